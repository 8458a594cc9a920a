import math

import pytest

from unirl.config.schema import OptimizerConfig
from unirl.train.megatron.schedule import learning_rate


def rates(total, **config):
    config = OptimizerConfig(lr=1.0, **config)
    return [learning_rate(config, step, total) for step in range(1, total + 3)]


def test_constant():
    assert rates(3) == [1.0] * 5


def test_warmup_reaches_the_peak_and_wastes_no_step():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear_goes_from_the_peak_to_the_minimum_after_the_last_step():
    assert rates(4, schedule="linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine():
    expected = [0.5, 1.0] + [(1 + math.cos(math.pi * left / 4)) / 2 for left in range(5)] + [0.0]
    assert rates(6, schedule="cosine", warmup_steps=2) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (5, 5), (5, 0), (3, 7)])
def test_corners_never_divide_by_zero(schedule, total, warmup):
    found = rates(total, schedule=schedule, warmup_steps=warmup)
    assert all(0 <= rate <= 1 for rate in found)
    assert all(rate > 0 for rate in found[:total])
    assert found[min(max(warmup, 1), total) - 1] == (1.0 if warmup <= total else total / warmup)


def test_an_unknown_schedule_is_an_error():
    with pytest.raises(ValueError, match=r"optimizer\.schedule is 'exponential'"):
        rates(2, schedule="exponential")
