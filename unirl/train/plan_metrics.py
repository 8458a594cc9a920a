"""What a plan of micro-batches wastes: padding, and ranks that wait for the last one."""

from collections.abc import Sequence

import torch

from unirl.algorithms import Metric
from unirl.train.packing import MicroBatch
from unirl.train.plan import CostModel


def plan_metrics(
    micro_batches: Sequence[MicroBatch], *, dp: int, token_budget: int, cost: CostModel
) -> dict[str, Metric]:
    """Of a plan with at least one micro-batch for each of `dp` ranks, as `plan_micro_batches` returns it.

    plan/micro_batches: of each rank, empty ones counted. plan/budget_use: tokens of samples, of the sum of all budgets.
    plan/padding_waste: padding and dummy tokens, of all tokens that are run.
    plan/imbalance: work of the rank that has most, over that of the mean rank. Ranks wait for each other only at the
        end of a step, so what counts is the rank's sum, not each micro-batch.
    plan/wasted_work: what all ranks together could do until the last is done and is not work on a sample: waiting,
        padding and dummies.
    """
    count = len(micro_batches) // dp
    ranks = [micro_batches[rank * count : (rank + 1) * count] for rank in range(dp)]
    tokens = sum(batch.tokens.numel() for batch in micro_batches)
    useful = sum(int(_useful_lengths(batch).sum()) for batch in micro_batches)
    works = [sum(_work(batch, batch.tree_cu_seqlens.diff(), cost) for batch in rank) for rank in ranks]
    useful_work = sum(_work(batch, _useful_lengths(batch), cost) for batch in micro_batches)
    until_last = dp * max(works)
    return {
        "plan/micro_batches": _ratio(count, 1),
        "plan/budget_use": _ratio(useful, len(micro_batches) * token_budget),
        "plan/padding_waste": _ratio(tokens - useful, tokens),
        "plan/imbalance": _ratio(max(works), sum(works) / dp),
        "plan/wasted_work": _ratio(until_last - useful_work, until_last),
    }


def _useful_lengths(batch: MicroBatch) -> torch.Tensor:
    """[G] int64: tokens of samples in each tree."""
    return torch.zeros_like(batch.tree_lengths) if batch.is_empty else batch.tree_lengths


def _work(batch: MicroBatch, lengths: torch.Tensor, cost: CostModel) -> float:
    """Of the trees of the micro-batch, were they of these lengths [G]."""
    tokens, pairs = lengths.sum().item(), lengths.square().sum().item()
    return cost.linear * tokens + cost.quadratic * pairs + cost.response * batch.targets.numel()


def _ratio(value: float, of: float) -> Metric:
    return Metric(torch.tensor(value, dtype=torch.float64), torch.tensor(of, dtype=torch.float64), "mean")
