"""Metrics merge as if taken over everything at once."""

import math

import pytest
import torch

from unirl.algorithms import Metric, merge_metrics


def metric(value: float, count: int, reduce: str) -> Metric:
    return Metric(torch.tensor(value), torch.tensor(count), reduce)


def test_each_kind_merges_its_way():
    merged = merge_metrics(
        [
            {"a": metric(3.0, 1, "mean"), "b": metric(2.0, 4, "max"), "c": metric(1.0, 1, "sum")},
            {"a": metric(1.0, 3, "mean"), "b": metric(5.0, 1, "max"), "c": metric(0.5, 0, "sum")},
        ]
    )
    assert merged == {"a": 1.0, "b": 5.0, "c": 1.5}


def test_a_part_alone_is_a_number():
    assert [float(metric(3.0, 2, reduce)) for reduce in ("mean", "sum", "max")] == [1.5, 3.0, 3.0]
    assert math.isnan(float(metric(0.0, 0, "mean")))


def test_parts_without_items_take_no_part():
    empty = {"a": metric(0.0, 0, "mean"), "b": metric(float("-inf"), 0, "max")}
    assert merge_metrics([empty]) == {}
    assert merge_metrics([empty, {"a": metric(4.0, 2, "mean"), "b": metric(-1.0, 2, "max")}]) == {"a": 2.0, "b": -1.0}


def test_one_name_has_one_reduction():
    with pytest.raises(ValueError, match=r"metric 'a': found reductions \['mean', 'sum'\]"):
        merge_metrics([{"a": metric(1.0, 1, "mean")}, {"a": metric(1.0, 1, "sum")}])
