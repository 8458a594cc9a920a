"""Normalisation: the faults known from other trainers, the cost at size."""

import math

import pytest
import torch

from unirl.algorithms import NormConfig, normalize

NAN = float("nan")
GROUP = NormConfig(mean_level="group", std_level=None)
GROUP_STD = NormConfig(mean_level="group", std_level="group")
RLOO = NormConfig(mean_level="group", std_level=None, mean_leave1out=True)


def run(values: list[float], group_ids: list[int] | None, config: NormConfig) -> list[float]:
    ids = None if group_ids is None else torch.tensor(group_ids)
    return normalize(torch.tensor(values, dtype=torch.float64), ids, config).tolist()


def test_a_reward_that_is_not_finite_is_absent():
    assert run([1, NAN, 3], [0, 0, 0], GROUP) == [-1, 0, 1]
    assert run([1, math.inf, 3], [0, 0, 0], GROUP_STD) == pytest.approx([-1 / math.sqrt(2), 0, 1 / math.sqrt(2)], 1e-4)
    assert run([NAN, NAN], [0, 0], GROUP_STD) == [0, 0]


def test_a_group_of_one_gives_zero():
    assert run([5.0, 1.0, 3.0], [7, 1, 1], GROUP)[0] == 0
    assert run([5.0, 1.0, 3.0], [7, 1, 1], GROUP_STD)[0] == 0
    assert run([5.0, 1.0, 3.0], [7, 1, 1], RLOO)[0] == 0


def test_groups_come_from_ids_not_from_strides():
    """[1, 2, 3] in groups of two: the lone 3 is 0, not 3 / 1e-5."""
    assert run([1, 2, 3], [0, 0, 1], NormConfig(mean_level=None, std_level="group"))[2] == 0
    with pytest.raises(ValueError, match="3 values do not divide into groups of group_size=2"):
        run([1, 2, 3], None, NormConfig(mean_level="group", std_level="group", group_size=2))
    with pytest.raises(ValueError, match="needs group_ids, or group_size"):
        run([1, 2, 3], None, GROUP)
    by_size = run([1, 2, 5, 9], None, NormConfig(mean_level="group", std_level=None, group_size=2))
    assert by_size == run([1, 2, 5, 9], [3, 3, 1, 1], GROUP)


@pytest.mark.parametrize("config", [GROUP, GROUP_STD, RLOO, NormConfig(), NormConfig(std_level=None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(config, dtype):
    """Else a trainer takes rounding noise for a gradient."""
    values = torch.full((7,), 0.1, dtype=dtype)
    assert not normalize(values, torch.zeros(7, dtype=torch.long), config).any()


@pytest.mark.parametrize(
    ("values", "ids", "config", "message"),
    [
        (torch.tensor([1, 2]), torch.tensor([0, 0]), GROUP, "expected floats"),
        (torch.ones(2, 1), torch.tensor([0, 0]), GROUP, "expected floats"),
        (torch.ones(2), torch.tensor([0, 0, 1]), GROUP, "group_ids: found"),
        (torch.ones(2), torch.tensor([0.0, 0.0]), GROUP, "expected integers"),
        (torch.ones(2), torch.tensor([0, 0]), {"mean_levle": "group"}, "did you mean 'mean_level'"),
        (torch.ones(2), torch.tensor([0, 0]), {"mean_level": "groups"}, "did you mean 'group'"),
        (torch.ones(2), torch.tensor([0, 0]), {"eps": 0}, "expected a number > 0"),
    ],
)
def test_what_does_not_fit_is_refused(values, ids, config, message):
    with pytest.raises(ValueError, match=message):
        normalize(values, ids, config)


def test_many_uneven_groups_need_no_loop_over_groups():
    """4,096 samples in 512 groups: the same number of tensor operations as four samples in two groups."""

    def operations(samples: int, groups: int) -> int:
        ids = torch.randint(0, groups, (samples,), generator=torch.Generator().manual_seed(0))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            normalize(torch.randn(samples), ids, GROUP_STD)
        return sum(event.count for event in profile.key_averages())

    assert operations(4096, 512) == operations(4, 2)
