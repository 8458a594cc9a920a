"""The tokenizer of a model folder and the tokens that end a response."""

import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from unirl.errors import UserError


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer in the Hugging Face folder `path`. Raises UserError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"model.path={path}: no tokenizer could be loaded from it: {error}") from error


def stop_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's EOS and those of the folder's generation_config.json.

    Raises UserError where there is none: every response would run to its limit.
    """
    found = {tokenizer.eos_token_id} - {None}
    generation_config = Path(path) / "generation_config.json"
    if generation_config.exists():
        ids = json.loads(generation_config.read_text()).get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [ids]) - {None}
    if not found:
        raise UserError(f"model.path={path}: neither the tokenizer nor generation_config.json names an EOS token")
    return tuple(sorted(found))
