import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unirl.data import PromptSampler
from unirl.errors import UserError

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**40)
batches = st.lists(st.integers(0, 60), max_size=12)


@given(sizes, seeds, st.booleans(), batches)
def test_each_epoch_draws_every_prompt_once_whatever_the_batches(num_prompts, seed, shuffle, batch_sizes):
    sampler = PromptSampler(num_prompts, seed, shuffle)
    drawn = []
    for n in batch_sizes:
        batch = sampler.next_batch(n)
        assert len(batch) == n
        drawn += batch
    whole = len(drawn) // num_prompts
    for epoch in range(whole):
        assert sorted(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))
    rest = drawn[whole * num_prompts :]
    assert len(set(rest)) == len(rest)
    assert drawn == PromptSampler(num_prompts, seed, shuffle).next_batch(len(drawn))
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["position"]) == divmod(len(drawn), num_prompts)


@given(sizes, seeds, st.booleans(), batches, batches)
def test_a_resumed_sampler_goes_on_with_the_same_prompts(num_prompts, seed, shuffle, before, after):
    sampler = PromptSampler(num_prompts, seed, shuffle)
    for n in before:
        sampler.next_batch(n)
    resumed = PromptSampler(num_prompts, seed, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    for n in after:
        assert resumed.next_batch(n) == sampler.next_batch(n)
    assert resumed.state_dict() == sampler.state_dict()


def test_orders_differ_by_epoch_and_seed():
    sampler = PromptSampler(50, 0, True)
    first, second = sampler.next_batch(50), sampler.next_batch(50)
    assert first != second
    assert first != PromptSampler(50, 1, True).next_batch(50)
    assert PromptSampler(50, 0, False).next_batch(100) == [*range(50), *range(50)]


def test_the_order_is_the_same_in_every_release():
    """A checkpoint must resume to the same prompts under another numpy: these numbers never change."""
    sampler = PromptSampler(8, 7, True)
    assert sampler.next_batch(16) == [0, 5, 2, 3, 4, 7, 6, 1, 2, 0, 3, 5, 6, 4, 7, 1]


@pytest.mark.parametrize(("name", "value"), [("num_prompts", 9), ("seed", 1), ("shuffle", False)])
def test_a_state_of_another_dataset_is_refused(name, value):
    arguments = {"num_prompts": 8, "seed": 0, "shuffle": True}
    state = PromptSampler(**{**arguments, name: value}).state_dict()
    with pytest.raises(UserError, match=f"{name}={value}, this run has {name}={arguments[name]}"):
        PromptSampler(**arguments).load_state_dict(state)


def test_a_damaged_state_is_refused():
    sampler = PromptSampler(8, 0, True)
    with pytest.raises(UserError, match="position 8 of 8"):
        sampler.load_state_dict({**sampler.state_dict(), "position": 8})


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        PromptSampler(0, 0, True)
