"""The base model of the multi-turn recipes: what it is shown, and that it never saw a held-out problem."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM

from unirl.config import compose
from unirl.data.tokenizer import load_tokenizer
from unirl.demo import calculator
from unirl.rollout.chat import ChatContinuation


@pytest.fixture(scope="module")
def base_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calculator") / "model"
    calculator.make_base_model(str(folder), careful_steps=2, lazy_steps=1)
    return folder


def test_the_folder_loads(base_model):
    assert 100_000 < AutoModelForCausalLM.from_pretrained(base_model).num_parameters() < 140_000


def test_what_it_is_shown_is_what_the_environment_will_say(base_model):
    tokenizer = load_tokenizer(str(base_model))
    chat = ChatContinuation(tokenizer, [tokenizer.eos_token_id])
    prompt = SimpleNamespace(token_ids=tuple(tokenizer("34 + 57 - 92 =")["input_ids"]), record={"answer": "-1"})
    responses = [*calculator.calls("34 + 57 - 92"), "\\boxed{-1}"]
    turns = list(calculator._episode(prompt, responses, tokenizer, chat))
    assert [tokenizer.decode(generated) for _, generated in turns] == [
        "calc(34+57)<|im_end|>",
        "calc(91-92)<|im_end|>",
        "\\boxed{-1}<|im_end|>",
    ]
    context = tokenizer.decode(turns[2][0])
    assert context.endswith("calc(91-92)<|im_end|>\n<|im_start|>tool\n-1<|im_end|>\n<|im_start|>assistant\n")
    for (context, generated), (longer, _) in pairwise(turns):
        assert longer[: len(context) + len(generated)] == [*context, *generated]


@pytest.mark.parametrize("recipe", ["calculator_multi_turn_tiny_cpu", "calculator_turn_gae_tiny_cpu"])
def test_the_recipes_hold_out_what_the_warm_start_never_saw(recipe):
    assert compose(f"ar/{recipe}", purpose="plan").data == calculator.DATA
