"""The tokenizer of the demo's model, as the base model's folder holds it."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.data.tokenizer import load_tokenizer, stop_token_ids
from unirl.demo.tokenizer import train_tokenizer

TEXTS = ["State the final answer: 4 + 3 - 2 =", "4+3=7, 7-2=5. \\boxed{5}", "user", "assistant"] * 10


@pytest.fixture(scope="module")
def tokenizer(base_model):
    return load_tokenizer(str(base_model))


@given(text=st.text())
def test_any_text_comes_back(text):
    tokenizer = trained()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@functools.cache
def trained():
    return train_tokenizer(TEXTS)


def test_a_digit_is_a_token_of_its_own(tokenizer):
    ids = tokenizer("12+345=357 7, -10")["input_ids"]
    pieces = [tokenizer.decode([token]) for token in ids]
    assert [piece for piece in pieces if any(char.isdigit() for char in piece)] == list("12345357710")


def test_the_box_opens_with_one_token_in_both_kinds_of_response(tokenizer):
    box = tokenizer("\\boxed{")["input_ids"]
    assert len(box) == 1
    assert box[0] in tokenizer("4+3=7. \\boxed{7}")["input_ids"]


def test_chat_template_and_end_of_turn(base_model, tokenizer):
    messages = [{"role": "user", "content": "1 + 2 ="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1 + 2 =<|im_end|>\n<|im_start|>assistant\n"
    assert stop_token_ids(str(base_model), tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == "user\n1 + 2 =\nassistant\n"
