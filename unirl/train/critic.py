"""Drives a critic: values of a batch, and the optimizer steps towards its returns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from unirl.algorithms import Denominators, Metric, ValueLossConfig, merge_metrics, value_loss
from unirl.config.schema import StackConfig
from unirl.train.packing import MicroBatch, PlannedModel, plan_for
from unirl.types import Part


class StepResult(Protocol):
    """What a model says of one optimizer step."""

    grad_norm: float
    lr: float
    skipped: bool


class Critic(PlannedModel, Protocol):
    """The value model under training, as far as it is driven here."""

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]: ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss_fn) -> list[dict[str, Metric]]: ...

    def optimizer_step(self) -> StepResult: ...


@dataclass(frozen=True)
class ValueLossFunction:
    """The value loss of a micro-batch with `values` and `returns`, for a critic to call.

    denominators: counted over all micro-batches of the step and all ranks.
    """

    config: ValueLossConfig
    denominators: Denominators

    def __call__(self, batch: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """values [R] -> the loss, a scalar with graph, and its metrics."""
        output = value_loss(
            self.config,
            values=values,
            old_values=batch.values,
            returns=batch.returns,
            loss_mask=batch.loss_mask,
            cu_seqlens=batch.loss_cu_seqlens,
            denominators=self.denominators,
        )
        return output.loss, output.metrics


class CriticTrainer:
    """A critic with its loss, driven over the micro-batches that the policy trains on."""

    def __init__(self, critic: Critic, loss: ValueLossConfig, stack: StackConfig):
        self.critic = critic
        self.loss = loss
        self.stack = stack

    def with_values(self, part: Part) -> Part:
        """The part with `values` [T] float32: V(state before the token is drawn) of generated tokens, 0 elsewhere."""
        micro_batches = plan_for(self.critic, part, torch.arange(len(part)), self.stack)
        values = torch.zeros_like(part.text.log_probs)
        if micro_batches:
            for batch, found in zip(micro_batches, self.critic.values(micro_batches), strict=True):
                values[batch.token_positions] = found
        return replace(part, values=values)

    def step(
        self, micro_batches: Sequence[MicroBatch], denominators: Denominators
    ) -> tuple[list[dict[str, Metric]], StepResult]:
        """One optimizer step on micro-batches with `values` and `returns`; the metrics of each, and of the step."""
        loss_fn = ValueLossFunction(self.loss, denominators)
        return self.critic.forward_backward(micro_batches, loss_fn), self.critic.optimizer_step()


def critic_metrics(micro_metrics: list[dict[str, Metric]], steps: list[StepResult]) -> dict[str, float]:
    """Metrics of the steps that a critic made on one batch."""
    if not steps:
        return {}
    metrics = merge_metrics(micro_metrics)
    metrics["value_loss"] /= len(steps)  # each step's loss is a sum over its own micro-batches
    return {
        **metrics,
        "critic/grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "critic/lr": steps[-1].lr,
        "critic/optimizer_steps": sum(not step.skipped for step in steps),
        "critic/skipped_steps": sum(step.skipped for step in steps),
    }
