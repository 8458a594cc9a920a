"""Train a model on the same batches under one layout of ranks, and gather all that must not depend on the layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from unirl.algorithms import (
    Denominators,
    PolicyLossConfig,
    ValueLossConfig,
    count_denominators,
    make_algorithm,
    merge_metrics,
)
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.critic import CriticTrainer
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.critic import MegatronCritic
from unirl.train.megatron.shards import RankWeights, full_weights, rank_weights
from unirl.train.packing import MicroBatch, plan_micro_batches
from unirl.types import Part


@dataclass(frozen=True)
class ParallelCase:
    """What is trained: one optimizer step on each of `parts`, from the weights of `model.path`.

    loss: of a policy, or of a critic on that folder (`ValueLossConfig`); parts have what it needs.
    """

    name: str
    model: ModelConfig
    loss: PolicyLossConfig | ValueLossConfig
    parts: list[Part]
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    stack: StackConfig = field(default_factory=StackConfig)
    temperature: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a layout makes of a case.

    token_values: by name, [T] float32 over the tokens of the first part, before the first step: `logp` and `entropy` of
        a policy, `values` of a critic; NaN on tokens that are not trained.
    metrics: of each step, merged over micro-batches and replicas; with `grad_norm`.
    gradients, weights: by Hugging Face name, float32: of the first step (as clipped), and after the last one.
    """

    token_values: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train_layout(
    cases: Sequence[ParallelCase], parallel: ParallelConfig, num_ranks: int, *, timeout_s: float = 300.0
) -> list[Outcome]:
    """The outcome of each case under `parallel` on `num_ranks` processes; in this one where that is 1."""
    if num_ranks == 1:
        by_rank = [_train_cases(cases, parallel)]
    else:
        by_rank = run_ranks(_train_cases, num_ranks, cases, parallel, timeout_s=timeout_s)
    return [_merge(case, ranks) for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True)]


@dataclass(frozen=True)
class _RankOutcome:
    """What one rank has to tell; token_values as (positions in the part's tokens, values by name) of micro-batches."""

    reports: bool
    token_values: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
    metrics: list[list[dict]]
    grad_norms: list[float]
    gradients: RankWeights
    weights: RankWeights


def _train_cases(cases: Sequence[ParallelCase], parallel: ParallelConfig) -> list[_RankOutcome]:
    return [_train(case, parallel) for case in cases]


def _train(case: ParallelCase, parallel: ParallelConfig) -> _RankOutcome:
    host = _host(case, parallel)
    try:
        token_values = _token_values(host, _own_micro_batches(case, case.parts[0], parallel, host))
        metrics, norms, gradients = [], [], None
        for part in case.parts:
            micro_batches = _own_micro_batches(case, part, parallel, host)
            found, step = _step(case, host, micro_batches, _denominators(part))
            metrics.append(found)
            norms.append(step.grad_norm)
            if gradients is None:
                host.gather_gradients()
                gradients = rank_weights(host.chunks, lambda parameter: parameter.main_grad)
        return _RankOutcome(
            reports=host.reports,
            token_values=token_values,
            metrics=metrics,
            grad_norms=norms,
            gradients=gradients,
            weights=rank_weights(host.chunks, lambda parameter: parameter),
        )
    finally:
        host.close()


def _host(case: ParallelCase, parallel: ParallelConfig) -> MegatronActor | MegatronCritic:
    common = {"parallel": parallel, "optimizer": case.optimizer, "total_steps": len(case.parts), "seed": case.seed}
    if isinstance(case.loss, ValueLossConfig):
        stack = {"max_grad_norm": case.stack.max_grad_norm, "recompute": case.stack.recompute}
        return MegatronCritic(case.model, **common, **stack)
    return MegatronActor(case.model, **common, stack=case.stack, temperature=case.temperature)


def _token_values(host, micro_batches: list[MicroBatch]) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    if isinstance(host, MegatronCritic):
        found = [{"values": values} for values in host.values(micro_batches)]
    else:
        found = [{"logp": logp, "entropy": entropy} for logp, entropy in host.log_probs(micro_batches)]
    return [
        (batch.token_positions, values)
        for batch, values in zip(micro_batches, found or [{}] * len(micro_batches), strict=True)
    ]


def _step(case: ParallelCase, host, micro_batches: list[MicroBatch], denominators: Denominators):
    if isinstance(host, MegatronCritic):
        return CriticTrainer(host, case.loss, case.stack).step(micro_batches, denominators)
    algorithm = make_algorithm(case.loss)
    return algorithm.compute_loss_and_backward(host, micro_batches, denominators), host.optimizer_step()


def _denominators(part: Part) -> Denominators:
    return count_denominators(part.text.loss_mask & torch.isfinite(part.text.log_probs), part.text.cu_seqlens)


def _own_micro_batches(case: ParallelCase, part: Part, parallel: ParallelConfig, host) -> list[MicroBatch]:
    """Those of this process's replica."""
    plans = [
        plan_micro_batches(
            part,
            torch.arange(len(part))[replica :: host.dp],
            token_budget=case.stack.micro_batch_tokens,
            share_prompts=case.stack.share_prompts,
        )
        for replica in range(host.dp)
    ]
    some = next(plan[0] for plan in plans if plan)
    count = max(map(len, plans))
    own = plans[host.dp_rank]
    own += [_empty(some)] * (count - len(own))
    return [_pad(batch, parallel) for batch in own]


def _empty(like: MicroBatch) -> MicroBatch:
    nothing = {f.name: v[:0] for f in fields(like) if (v := getattr(like, f.name)) is not None}
    one = torch.zeros(1, dtype=torch.int64)
    filled = {"tokens": one, "position_ids": one, "branch_ids": one, "tree_cu_seqlens": torch.tensor([0, 1])}
    return replace(like, **nothing | filled | {"loss_cu_seqlens": one})


def _pad(batch: MicroBatch, parallel: ParallelConfig) -> MicroBatch:
    multiple = 2 * parallel.cp if parallel.cp > 1 else 1
    total = math.lcm(multiple, parallel.cp * parallel.tp if parallel.sequence_parallel else 1)
    tokens, positions, branches, bounds = [], [], [], [0]
    start = torch.zeros(batch.tokens.numel(), dtype=torch.int64)
    trees = list(zip(batch.tree_cu_seqlens[:-1].tolist(), batch.tree_cu_seqlens[1:].tolist(), strict=True))
    for index, (first, last) in enumerate(trees):
        start[first:last] = bounds[-1] - first
        length = last - first
        pad = -length % multiple
        if index == len(trees) - 1:
            pad += -(bounds[-1] + length + pad) % total
        tokens.append(torch.nn.functional.pad(batch.tokens[first:last], (0, pad)))
        positions.append(
            torch.cat([batch.position_ids[first:last], torch.arange(pad) + batch.position_ids[last - 1] + 1])
        )
        branches.append(torch.nn.functional.pad(batch.branch_ids[first:last], (0, pad)))
        bounds.append(bounds[-1] + length + pad)
    return replace(
        batch,
        tokens=torch.cat(tokens),
        position_ids=torch.cat(positions),
        branch_ids=torch.cat(branches),
        tree_cu_seqlens=torch.tensor(bounds),
        predict_positions=batch.predict_positions + start[batch.predict_positions],
    )


def _merge(case: ParallelCase, ranks: Sequence[_RankOutcome]) -> Outcome:
    reporting = [rank for rank in ranks if rank.reports]
    tokens = case.parts[0].text.tokens.numel()
    token_values: dict[str, torch.Tensor] = {}
    for positions, values in (found for rank in reporting for found in rank.token_values):
        for name, value in values.items():
            token_values.setdefault(name, torch.full((tokens,), math.nan))[positions] = value
    norms = {tuple(rank.grad_norms) for rank in ranks}
    if len(norms) > 1:
        raise RuntimeError(f"ranks found different gradient norms: {sorted(norms)}")
    metrics = [
        {**merge_metrics(part for rank in reporting for part in rank.metrics[step]), "grad_norm": norm}
        for step, norm in enumerate(norms.pop())
    ]
    return Outcome(
        token_values,
        metrics,
        dict(full_weights([rank.gradients for rank in ranks])),
        dict(full_weights([rank.weights for rank in ranks])),
    )
