"""Metrics as sums and counts, so that micro-batches and ranks merge exactly."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Metric:
    """One metric of one part of a batch.

    value: 0-dim; the sum over `count` items (reduce mean), the sum (reduce sum), or the largest (reduce max); or [R],
    one value for each response token of a micro-batch (reduce none), which a merge leaves out.
    count: 0-dim; items seen. A mean or a maximum over no items does not take part in a merge.
    """

    value: torch.Tensor
    count: torch.Tensor
    reduce: Literal["mean", "sum", "max", "none"]

    def __float__(self) -> float:
        """What this part alone says: NaN for a mean over no items."""
        if self.reduce != "mean":
            return float(self.value)
        return float(self.value) / float(self.count) if self.count > 0 else float("nan")


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> Metric:
    """values [T], mask [T] bool: the mean over the True tokens."""
    return Metric(torch.where(mask, values, 0).sum(), mask.sum(), "mean")


def masked_max(values: torch.Tensor, mask: torch.Tensor) -> Metric:
    """values [T], mask [T] bool: the largest of the True tokens."""
    lowest = values.new_full((1,), -torch.inf)
    return Metric(torch.cat([torch.where(mask, values, -torch.inf), lowest]).max(), mask.sum(), "max")


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> dict[str, float]:
    """Metrics of micro-batches or ranks -> one number a name, as if taken over all of them at once.

    A name may be absent from some parts. A mean or maximum over no items at all is left out.
    """
    by_name: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            if metric.reduce == "none":
                continue
            by_name.setdefault(name, []).append(metric)
    merged = {}
    for name, metrics in by_name.items():
        kinds = {metric.reduce for metric in metrics}
        if len(kinds) > 1:
            raise ValueError(f"metric {name!r}: found reductions {sorted(kinds)}, expected one")
        pairs = [(float(metric.value), float(metric.count)) for metric in metrics]
        seen = [value for value, count in pairs if count > 0]
        match kinds.pop():
            case "sum":
                merged[name] = sum(value for value, _ in pairs)
            case "mean" if seen:
                merged[name] = sum(seen) / sum(count for _, count in pairs)
            case "max" if seen:
                merged[name] = max(seen)
    return merged
