import pytest
import torch

from unirl.config.schema import RewardConfig
from unirl.reward import shape_rewards
from unirl.types import SampleStatus

STATUS = torch.tensor([SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.COMPLETED, SampleStatus.ABORTED])
LENGTHS = torch.tensor([80, 100, 100, 10])
REWARDS = torch.tensor([1.0, 1.0, 0.0, 1.0])


def shape(rewards=REWARDS, **keys):
    return shape_rewards(rewards, STATUS, LENGTHS, config=RewardConfig(**keys), max_new_tokens=100).tolist()


def test_keep():
    assert shape(truncated_reward="keep") == REWARDS.tolist()


def test_bias_then_scale_then_clip():
    assert shape(bias=-0.5, scale=4.0) == [2.0, 2.0, -2.0, 2.0]
    assert shape(bias=-0.25, scale=4.0, clip=1.5) == [1.5, 1.5, -1.0, 1.5]
    assert shape(bias=-0.5, scale=4.0, truncated_reward="zero") == [2.0, 0.0, -2.0, 2.0]


def test_zero_goes_by_the_status_not_the_length():
    assert shape(torch.ones(4), truncated_reward="zero") == [1.0, 0.0, 1.0, 1.0]


def test_soft_goes_by_the_length():
    shaped = shape(truncated_reward="soft", overlong_tokens=40, overlong_penalty_factor=0.5)
    assert shaped == pytest.approx([1.0 - 0.25, 1.0 - 0.5, -0.5, 1.0])


@pytest.mark.parametrize("mode", ["keep", "soft", "zero"])
def test_no_verdict_stays_none(mode):
    shaped = shape(torch.tensor([float("nan"), 1.0, 1.0, 1.0]), truncated_reward=mode, overlong_tokens=40)
    assert shaped[0] != shaped[0]


def test_grades_are_not_changed_in_place():
    rewards = REWARDS.clone()
    shape(rewards, truncated_reward="zero")
    assert torch.equal(rewards, REWARDS)


@pytest.mark.parametrize("keys", [{"truncated_reward": "soft", "overlong_tokens": 101}, {"truncated_reward": "half"}])
def test_refused(keys):
    with pytest.raises(ValueError, match=r"overlong_tokens|truncated_reward"):
        shape(**keys)
