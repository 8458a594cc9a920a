"""SmolLM2 from the Python package that carries it to a Hugging Face folder."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from unirl.config import compose
from unirl.data import load_prompts
from unirl.data.tokenizer import load_tokenizer, stop_token_ids
from unirl.demo import smollm2
from unirl.errors import UserError


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGES", ("gguf_of_another_world",))
    with pytest.raises(UserError, match="not found: gguf_of_another_world"):
        smollm2.export("anywhere")


@pytest.mark.llm
def test_the_folder_answers_like_the_original(smollm2_folder):
    folder = smollm2_folder
    file = smollm2.find_gguf()
    original = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = load_tokenizer(str(folder))
    chat = [{"role": "user", "content": "What is 3 + 4? Put 12 in \\boxed{}, déjà vu"}]
    ids = original.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] == ids
    assert stop_token_ids(str(folder), tokenizer) == (original.eos_token_id,)
    assert tokenizer.decode(original.eos_token_id) == "<|im_end|>"

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([ids])).logits, source(torch.tensor([ids])).logits)

    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 + 4?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**question, max_new_tokens=8, do_sample=False)[0, question["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("3 + 4 = 7")


@pytest.mark.llm
def test_the_recipe_holds_out_problems_and_its_example_is_none_of_them(smollm2_folder):
    folder = smollm2_folder
    config = compose("ar/smollm2_135m_chain_sum_cpu", [f"model.path={folder}"], purpose="plan")
    tokenizer = load_tokenizer(config.model.path)
    splits = [load_prompts(config.data, tokenizer, split=split) for split in ("train", "heldout")]
    train, heldout = ({prompt.record["prompt"] for prompt in split} for split in splits)
    assert (len(train), len(heldout)) == (136, 64)
    assert not train & heldout
    example = config.data.example_messages[0]["content"]
    assert not any(question in example for question in train | heldout)
