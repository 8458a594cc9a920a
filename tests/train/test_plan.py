"""The arithmetic of a plan: bins, ranks, costs."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import TARGET_CASES, measure
from tests.train.megatron.conftest import make_actor, make_folder  # noqa: F401 - fixtures
from unirl.train.plan import (
    CostModel,
    ParallelShape,
    balanced_partition,
    deal_trees,
    first_fit_decreasing,
)

sizes = st.lists(st.integers(1, 40), max_size=40)


def naive_first_fit_decreasing(sizes, capacity):
    bins = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [members for members in bins if sum(sizes[i] for i in members) + sizes[index] <= capacity]
        (fitting or (bins.append([]) or bins[-1:]))[0].append(index)
    return [sorted(members) for members in bins]


def dearest(partition, costs):
    return max(sum(costs[i] for i in part) for part in partition)


@given(sizes, st.integers(40, 90))
def test_first_fit_is_the_first_fit(sizes, capacity):
    bins = first_fit_decreasing(sizes, capacity)
    assert bins == naive_first_fit_decreasing(sizes, capacity)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= capacity for members in bins)


def test_what_fits_nowhere_is_refused():
    with pytest.raises(ValueError, match="found a size of 7, more than the capacity 6"):
        first_fit_decreasing([1, 7], 6)


@given(sizes, st.integers(1, 9), st.integers(1, 4), st.integers(40, 90))
def test_every_tree_is_dealt_once_and_all_ranks_run_as_many_micro_batches(sizes, dp, multiple, capacity):
    bins = deal_trees(sizes, [size**1.5 for size in sizes], capacity=capacity, dp=dp, count_multiple=multiple)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in members) <= capacity for members in bins)
    count, rest = divmod(len(bins), dp)
    assert rest == 0
    assert count % multiple == 0
    assert (count == 0) == (not sizes)
    needed = [sum(bool(members) for members in bins[rank * count : (rank + 1) * count]) for rank in range(dp)]
    assert count - max(needed) < multiple
    for rank, used in enumerate(needed):
        assert all(bins[rank * count : rank * count + used]), "empty ones come last"


@given(sizes, st.integers(40, 90))
def test_one_rank_gets_the_first_fit(sizes, capacity):
    assert deal_trees(sizes, sizes, capacity=capacity) == first_fit_decreasing(sizes, capacity)


@settings(deadline=None)
@given(st.lists(st.integers(1, 30), max_size=7), st.integers(1, 3))
def test_a_partition_is_near_the_best_one(costs, parts):
    found = balanced_partition(costs, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(costs)))
    best = min(
        max(sum(cost for cost, part in zip(costs, choice, strict=True) if part == p) for p in range(parts))
        for choice in itertools.product(range(parts), repeat=len(costs))
    )
    assert best <= dearest(found, costs) <= 4 / 3 * best


def test_few_large_items_are_exchanged_until_even():
    """The longest-processing-time rule alone gives 24 and 18."""
    assert dearest(balanced_partition([11, 10, 8, 7, 6], 2), [11, 10, 8, 7, 6]) == 21
    rng = random.Random(0)
    costs = [rng.lognormvariate(0, 0.6) for _ in range(192)]
    partition = balanced_partition(costs, 48)
    assert dearest(partition, costs) * 48 / sum(costs) < 1.02
    assert partition == balanced_partition(costs, 48)


def test_more_ranks_than_items():
    assert sorted(balanced_partition([5.0, 1.0], 4)) == [[], [], [0], [1]]
    assert deal_trees([5, 1], [5.0, 1.0], capacity=6, dp=3) == [[0], [1], []]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({}, (1, 1, 1, 1)),
        ({"dp": 3, "tp": 4, "pp": 2}, (3, 1, 1, 1)),
        ({"tp": 4, "sequence_parallel": True}, (1, 1, 4, 1)),
        ({"tp": 3, "cp": 2, "sequence_parallel": True}, (1, 4, 12, 1)),
        ({"pp": 2, "vpp": 2, "cp": 4}, (1, 8, 8, 2)),
    ],
)
def test_what_a_layout_asks_for(layout, expected):
    shape = ParallelShape.of_layout(**layout)
    assert (shape.dp, shape.tree_multiple, shape.token_multiple, shape.count_multiple) == expected


def test_a_layout_of_no_ranks_is_refused():
    with pytest.raises(ValueError, match=r"ParallelShape\.dp: found 0, expected 1 or more"):
        ParallelShape(dp=0)


def test_the_cost_of_a_token_is_two_for_each_weight_that_it_meets(make_folder, make_actor):  # noqa: F811
    actor = make_actor(make_folder("llama3-untied")[0])
    weights = dict(actor.export_weights())
    in_layers = sum(w.numel() for name, w in weights.items() if ".layers." in name and w.dim() == 2)
    assert actor.cost.linear == 2 * in_layers
    assert actor.cost.response == 2 * weights["lm_head.weight"].numel()
    # scores and values: two products of head_dim = 8 for each of 4 heads, 2 layers and each pair, half of all
    assert actor.cost.quadratic == 2 * 4 * (2 * 2 * 8) / 2
    assert CostModel(1, 0.5, 3).work(tokens=10, responses=4) == 10 + 50 + 12


@pytest.mark.parametrize("case", TARGET_CASES, ids=lambda case: f"budget {case.token_budget}")
def test_lengths_like_those_of_dapo_waste_little(case):
    found = measure(case, seed=1)
    assert found["plan/wasted_work"] <= 0.02
    assert found["plan/padding_waste"] <= 0.02
    assert found["plan/imbalance"] <= 1.03
