"""The base model of the demo: its folder, and that it never saw a held-out problem."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from unirl.config import compose
from unirl.data import load_prompts
from unirl.data.tokenizer import load_tokenizer
from unirl.demo import arith
from unirl.demo.imitation import response_loss
from unirl.errors import UserError


def test_the_folder_loads_and_speaks(base_model):
    model = AutoModelForCausalLM.from_pretrained(base_model)
    tokenizer = load_tokenizer(str(base_model))
    assert model.config.model_type == "qwen3"
    assert 100_000 < model.num_parameters() < 140_000
    inputs = tokenizer("1 + 2 + 3 =", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_equal_calls_give_equal_bytes(base_model, tmp_path):
    torch.manual_seed(99)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    arith.make_base_model(str(tmp_path / "again"), careful_steps=3, lazy_steps=2)
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's random state is left alone"
    assert torch.get_num_threads() == threads
    again = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert again == {file.name: file.read_bytes() for file in base_model.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["again"], "nothing is left beside it"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"model.path=.*/file/model: the folder cannot be written"):
        arith.make_base_model(str(tmp_path / "file" / "model"), careful_steps=0, lazy_steps=0)


def test_the_recipe_holds_out_what_the_warm_start_never_saw(base_model):
    config = compose("ar/arith_drpo_tiny_cpu", purpose="plan")
    assert config.data == arith.DATA
    tokenizer = load_tokenizer(str(base_model))
    train, heldout = (
        {prompt.record["prompt"] for prompt in load_prompts(config.data, tokenizer, split=split)}
        for split in ("train", "heldout")
    )
    assert (len(train), len(heldout)) == (3000, 256)
    assert not train & heldout


def test_the_loss_is_of_the_response_alone(base_model):
    model = AutoModelForCausalLM.from_pretrained(base_model)
    batch = [((5, 6, 7), (8, 9, 2)), ((5, 6), (7, 2)), ((9,), (8, 7, 6, 5, 2))]
    total = sum(
        model(input_ids=torch.tensor([[*prompt, *response]]))
        .logits[0, len(prompt) - 1 : -1]
        .log_softmax(-1)[range(len(response)), response]
        .sum()
        for prompt, response in batch
    )
    torch.testing.assert_close(response_loss(model, batch), -total / sum(len(response) for _, response in batch))
