"""Overlong penalty and the advantages of multi-step episodes."""

import pytest
import torch

from unirl.algorithms import overlong_penalty, step_advantages

ZONE = {"overlong_tokens": 20, "max_new_tokens": 100, "overlong_penalty_factor": 0.5}


def test_the_penalty_rises_over_the_zone_and_stays():
    rewards = overlong_penalty(ZONE, torch.ones(6), torch.tensor([1, 80, 81, 90, 100, 130]))
    torch.testing.assert_close(rewards, torch.tensor([1.0, 1.0, 0.975, 0.75, 0.5, 0.5]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlong_tokens": 0}, "overlong_tokens: found 0, expected a number >= 1"),
        ({"overlong_tokens": 101}, "expected at most max_new_tokens=100"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"overlong_penalty_factor": -1.0}, "overlong_penalty_factor"),
    ],
)
def test_a_zone_that_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty({**ZONE, **changes}, torch.ones(1), torch.tensor([100]))


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="missing key 'max_new_tokens'"):
        overlong_penalty({"overlong_tokens": 20}, torch.ones(1), torch.tensor([100]))


def test_steps_share_the_advantage_of_their_episode():
    values, steps = torch.tensor([3.0, -8.0]), torch.tensor([3, 4])
    assert step_advantages({}, values, steps).tolist() == [1.0, -2.0]
    assert step_advantages({"step_adv_const_length": 8}, values, steps).tolist() == [0.375, -1.0]


def test_vectors_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(2,\), lengths \(1,\), expected vectors of one length"):
        overlong_penalty(ZONE, torch.ones(2), torch.tensor([100]))
    with pytest.raises(ValueError, match="expected vectors of one length"):
        step_advantages({}, torch.ones(2), torch.tensor([3]))


def test_an_episode_without_steps_is_refused():
    with pytest.raises(ValueError, match="found 0, expected at least 1"):
        step_advantages({}, torch.ones(2), torch.tensor([1, 0]))
