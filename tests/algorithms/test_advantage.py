"""GAE: lambdas by name, what does not spread, what it refuses; its values are compared in `test_brute_force`."""

import math

import pytest
import torch

from unirl.algorithms import gae
from unirl.algorithms.advantage import _reverse_scan


def two_thirds(num_steps: int, scale: float) -> float:
    """A lambda of the user's own."""
    return scale * 2 / 3 if num_steps else 0.0


def random_inputs(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    size = sum(lengths)
    mask = torch.rand(size, generator=generator) < 0.7
    turns = []
    for length in lengths:
        turns += sorted(torch.randint(0, max(length, 1), (length,), generator=generator).tolist())
    return {
        "task_rewards": torch.randn(size, generator=generator, dtype=torch.float64),
        "kl_rewards": 0.1 * torch.randn(size, generator=generator, dtype=torch.float64),
        "values": torch.randn(size, generator=generator, dtype=torch.float64),
        "loss_mask": mask,
        "turn_ids": torch.tensor(turns, dtype=torch.long).masked_fill(~mask, -1),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "truncated": torch.rand(len(lengths), generator=generator) < 0.5,
    }


def test_a_value_that_is_not_finite_stays_in_its_sequence():
    inputs = random_inputs([3, 4, 2], seed=0)
    inputs["loss_mask"][:] = True
    clean = gae({}, **inputs)
    inputs["values"][5] = math.nan
    spoilt = gae({}, **inputs)
    for before, after in zip(clean, spoilt, strict=True):
        assert torch.equal(before[:3], after[:3])
        assert torch.equal(before[7:], after[7:])


@pytest.mark.parametrize(
    ("name", "kwargs", "steps", "expected"),
    [
        ("vapo_length_adaptive", {"alpha": 0.5}, 1, 0.0),
        ("vapo_length_adaptive", {"alpha": 0.5}, 8, 0.75),
        ("relative_position", {"q": 0.5}, 1, 1.0),
        ("relative_position", {"q": 0.25}, 3, 0.5),
        ("tests.algorithms.test_advantage.two_thirds", {"scale": 0.75}, 4, 0.5),
    ],
)
def test_lambda_by_name(name, kwargs, steps, expected):
    inputs = random_inputs([steps], seed=1)
    inputs["loss_mask"][:] = True
    found = gae({"gae_lambda": name, "gae_lambda_kwargs": kwargs}, **inputs)
    assert torch.equal(found[0], gae({"gae_lambda": expected}, **inputs)[0])


def test_long_sequences_take_few_operations():
    x = torch.ones(100_000, dtype=torch.float64)
    decay = torch.full_like(x, 0.999)
    decay[-1] = 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = _reverse_scan(x, decay, longest=x.numel())
    assert sum(event.count for event in profile.key_averages()) < 1000
    assert y[0].item() == pytest.approx((1 - 0.999**100_000) / (1 - 0.999), rel=1e-12)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        ({"gae_timestep_unit": "turn"}, {"turn_ids": None}, "turn_ids are missing"),
        ({"gae_timestep_unit": "turn"}, {"turn_ids": torch.zeros(3)}, "expected integers"),
        ({"gae_timestep_unit": "turn"}, {"turn_ids": torch.zeros(2).long()}, "expected integers"),
        ({"gae_timestep_unit": "turn"}, {"turn_ids": torch.tensor([0, -1, 0])}, "found -1"),
        ({"gae_timestep_unit": "turn"}, {"turn_ids": torch.tensor([0, 1, 9])}, "found 9 in a sequence of 3 tokens"),
        ({"gae_timestep_unit": "turn"}, {"turn_ids": torch.tensor([1, 0, 1])}, "found 0 after 1"),
        ({}, {"values": torch.zeros(4)}, "values: found shape"),
        ({}, {"truncated": torch.zeros(2).bool()}, "truncated: found shape"),
        ({"gae_lambda": 1.5}, {}, "expected a number from 0 to 1"),
        ({"gae_lambda": "vapo"}, {}, "one of vapo_length_adaptive"),
        ({"gae_lambda": "vapo_length_adaptive"}, {}, "takes \\['alpha'\\]"),
        ({"gae_lambda": "vapo_length_adaptive", "gae_lambda_kwargs": {"alpha": 0}}, {}, "expected a number > 0"),
        ({"gae_lambda": "relative_position", "gae_lambda_kwargs": {"q": -0.5}}, {}, "expected a number from 0 to 1"),
        ({"gae_lambda": "math.pi"}, {}, "expected a callable"),
        ({"gae_lambda": "math.phi"}, {}, "cannot be imported"),
        ({"gae_lambda": "math.exp"}, {}, "gives 20.08"),
        ({"gae_lambda": "builtins.print"}, {}, "gives None, expected a number"),
        ({"discount": 1.01}, {}, "discount: found 1.01"),
        ({"gae_timestep_unit": "turns"}, {}, "did you mean 'turn'"),
    ],
)
def test_what_does_not_fit_is_refused(config, changes, message):
    inputs = random_inputs([3], seed=0)
    inputs["loss_mask"][:] = True
    with pytest.raises(ValueError, match=message):
        gae(config, **{**inputs, **changes})


def test_masked_turn_ids_are_not_read():
    inputs = random_inputs([4], seed=2)
    inputs["loss_mask"] = torch.tensor([True, False, True, True])
    inputs["turn_ids"] = torch.tensor([0, -1, 1, 1])
    expected = gae({"gae_timestep_unit": "turn"}, **inputs)
    inputs["turn_ids"] = torch.tensor([0, 99, 1, 1])
    assert torch.equal(gae({"gae_timestep_unit": "turn"}, **inputs)[0], expected[0])
