"""Train a model on the same batches under one layout of ranks, and gather all that must not depend on the layout."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

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
from unirl.train.megatron.weights import iterate_weights
from unirl.train.packing import MicroBatch, plan_for
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


Job = tuple[ParallelCase, ParallelConfig]
"""What to train, and under which layout."""


def train_jobs(jobs: Sequence[Job], num_ranks: int, *, timeout_s: float = 300.0) -> list[Outcome]:
    """The outcome of each job, one after the other, on `num_ranks` processes, on the CPU.

    One rank runs in this process, unless that would take its GPU. Raises RankError where a rank fails or all is not
    done after `timeout_s` seconds, RuntimeError where ranks that must have the same bits have not.
    """
    if num_ranks == 1 and not torch.cuda.is_available():
        by_rank = [_train_jobs(jobs)]
    else:
        by_rank = run_ranks(_train_jobs, num_ranks, jobs, timeout_s=timeout_s)
    return [_merge(case, ranks) for (case, _), ranks in zip(jobs, zip(*by_rank, strict=True), strict=True)]


@dataclass(frozen=True)
class _RankOutcome:
    """What one rank has to tell; token_values as (positions in the part's tokens, values by name) of micro-batches."""

    reports: bool
    token_values: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
    metrics: list[list[dict]]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def _train_jobs(jobs: Sequence[Job]) -> list[_RankOutcome]:
    return [_train(case, parallel) for case, parallel in jobs]


def _train(case: ParallelCase, parallel: ParallelConfig) -> _RankOutcome:
    host = _host(case, parallel)
    try:
        token_values = _token_values(host, _own_micro_batches(case, case.parts[0], host))
        metrics, norms, gradients = [], [], {}
        for index, part in enumerate(case.parts):
            found, step = _step(case, host, _own_micro_batches(case, part, host), _denominators(part))
            metrics.append(found)
            norms.append(step.grad_norm)
            if index == 0:
                gradients = _named(host, host.gradients(), lambda parameter: parameter.main_grad)
        weights = _named(host, iterate_weights(host.chunks), lambda parameter: parameter)
        return _RankOutcome(host.reports, token_values, metrics, norms, gradients, weights)
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


def _own_micro_batches(case: ParallelCase, part: Part, host) -> list[MicroBatch]:
    """Those of this process's replica."""
    plan = plan_for(host, part, torch.arange(len(part)), case.stack)
    count = len(plan) // host.shape.dp
    return plan[host.dp_rank * count : (host.dp_rank + 1) * count]


def _named(host, pairs: Iterable[tuple[str, torch.Tensor]], of_parameter: Callable) -> dict[str, torch.Tensor]:
    """By name, float32, with the head of a critic, which Hugging Face has no names for; {} but on ranks that report."""
    pairs = [(name, tensor.float().clone()) for name, tensor in pairs]  # collective: every rank runs it
    if not host.reports:
        return {}
    if isinstance(host, MegatronCritic):
        head = host.model.value_head.named_parameters()
        pairs += [(f"value_head.{name}", of_parameter(parameter).detach().clone()) for name, parameter in head]
    return dict(pairs)


def _merge(case: ParallelCase, ranks: Sequence[_RankOutcome]) -> Outcome:
    reporting = [rank for rank in ranks if rank.reports]
    tokens = case.parts[0].text.tokens.numel()
    token_values: dict[str, torch.Tensor] = {}
    for positions, values in (found for rank in reporting for found in rank.token_values):
        for name, value in values.items():
            token_values.setdefault(name, torch.full((tokens,), math.nan))[positions] = value
    metrics = [
        {**merge_metrics(part for rank in reporting for part in rank.metrics[step]), "grad_norm": norm}
        for step, norm in enumerate(_equal("gradient norms", [rank.grad_norms for rank in ranks]))
    ]
    return Outcome(
        token_values,
        metrics,
        _equal("gradients", [rank.gradients for rank in reporting]),
        _equal("weights", [rank.weights for rank in reporting]),
    )


def _equal(what: str, of_ranks: list):
    """The one that all replicas or ranks have; RuntimeError where they do not have the same bits."""
    first, *others = of_ranks
    for other in others:
        same = (
            all(torch.equal(tensor, other[name]) for name, tensor in first.items())
            if isinstance(first, dict)
            else first == other
        )
        if not same:
            raise RuntimeError(f"the {what} of ranks are not the same")
    return first
