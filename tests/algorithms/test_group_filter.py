import pytest
import torch

from unirl.algorithms import rewards_differ

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("rewards", "differ"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.1 + 0.2, 0.3], True),
        ([1.0, 1.0 + 2**-52], True),
        ([0.0, -0.0], False),
        ([NAN, 1.0, 1.0], False),
        ([NAN, 1.0, 0.0], True),
        ([NAN, 1.0], False),
        ([INF, 1.0, 1.0], False),
        ([NAN, NAN], False),
        ([1.0], False),
        ([], False),
    ],
)
def test_rewards_are_compared_exactly(rewards, differ):
    assert rewards_differ(torch.tensor(rewards, dtype=torch.float64)) is differ


def test_the_smallest_difference_of_a_float32_counts():
    one = torch.ones(2)
    assert rewards_differ(torch.nextafter(one, torch.tensor([2.0, 1.0])))
