"""`TrainStack`: one rollout batch in, optimizer steps and their metrics out."""

from dataclasses import replace
from typing import Protocol

import torch

from unirl.algorithms import (
    REPLAY_LOGP,
    Denominators,
    Metric,
    PolicyAlgorithm,
    count_denominators,
    merge_metrics,
    required_inputs,
    value_statistics,
)
from unirl.config.schema import StackConfig
from unirl.train.critic import CriticTrainer, StepResult, critic_metrics
from unirl.train.log_prob_pass import LogProbPolicy, token_log_probs
from unirl.train.packing import MicroBatch, join_plans, plan_for
from unirl.train.plan_metrics import plan_metrics
from unirl.types import Part


class Actor(LogProbPolicy, Protocol):
    """The policy under training, as far as `TrainStack` needs it."""

    def forward_backward(self, micro_batches, loss_fn) -> list[dict]: ...

    def optimizer_step(self) -> StepResult: ...


class TrainStack:
    """Splits a batch into mini-batches and micro-batches and drives algorithm and actor over them, and the critic where
    there is one.

    Raises ValueError where several updates per batch are asked of an algorithm that anchors its ratio on the
    rollout's own log-probs, unless `allow_multi_update`.
    """

    def __init__(
        self,
        actor: Actor,
        algorithm: PolicyAlgorithm,
        config: StackConfig,
        *,
        allow_multi_update: bool = False,
        critic: CriticTrainer | None = None,
    ):
        if config.num_updates_per_batch > 1 and not (algorithm.supports_multi_update or allow_multi_update):
            raise ValueError(
                f"{type(algorithm).__name__} makes one update per batch, found "
                f"stack.num_updates_per_batch={config.num_updates_per_batch}: set it to 1, or "
                "algorithm.allow_multi_update=true to split the batch into disjoint mini-batches"
            )
        self.actor = actor
        self.algorithm = algorithm
        self.config = config
        self.critic = critic
        self.replay_logp: torch.Tensor | None = None
        """[T] float32: what the actor said of the last part before its first step; NaN where it was not asked."""

    def with_values(self, part: Part) -> Part:
        """The part with the critic's values [T]; the part itself where there is no critic."""
        return part if self.critic is None else self.critic.with_values(part)

    def train_track(self, part: Part, *, train_policy: bool = True) -> dict[str, float]:
        """Train on a graded `part` with advantages: `stack.num_updates_per_batch` optimizer steps at most.

        Samples that cannot move the policy (advantage 0 everywhere) are not run through the model, but stay in the
        denominators. A mini-batch without any other sample makes no optimizer step. Where the loss needs the proximal
        policy, its log-probs are those of the policy as it is now, before the first step. Returns metrics over the
        trained tokens; `optimizer_steps` counts the steps made, and where it is 0 there is neither `loss` nor
        `grad_norm`.

        A critic makes a step of its own on the same micro-batches, which then hold every sample with a token to learn
        from; without `train_policy` it is the only one to step.

        Raises ValueError where `part` has no advantages, or no values and returns for the critic.
        """
        self._check_estimates(part)
        mini_batches = self._mini_batches(part)
        if train_policy and "prox_logp" in required_inputs(self.algorithm.config):
            part = self._with_proximal_policy(part, mini_batches)
        self.replay_logp = self._known_replay(part)
        micro_metrics, steps, plans, trained = [], [], [], 0
        value_metrics, critic_steps = [], []
        for samples in mini_batches:
            denominators = _denominators(part, samples)
            micro_batches = self._micro_batches(part, samples)
            if not micro_batches:
                continue
            plans.append(self._plan_metrics(micro_batches))
            if self.critic is not None:
                found, step = self.critic.step(micro_batches, denominators)
                value_metrics += found
                critic_steps.append(step)
            if not (train_policy and _moves_policy(part, self.algorithm)[samples].any()):
                continue
            trained += sum(batch.sample_positions.numel() for batch in micro_batches)
            found = self.algorithm.compute_loss_and_backward(self.actor, micro_batches, denominators)
            if not steps and part.prox_logp is None:
                self._note_replay(micro_batches, found)
            micro_metrics += found
            steps.append(self.actor.optimizer_step())
        return {
            **_step_metrics(merge_metrics(micro_metrics), steps),
            **self._critic_metrics(part, value_metrics, critic_steps),
            **merge_metrics(plans),
            "optimizer_steps": sum(not step.skipped for step in steps),
            "skipped_steps": sum(step.skipped for step in steps),
            "trained_fraction": trained / max(len(part), 1),
        }

    def _check_estimates(self, part: Part) -> None:
        if part.advantages is None:
            raise ValueError("train_track: the part has no advantages yet; compute them first")
        if self.critic is not None and (part.values is None or part.returns is None):
            raise ValueError(
                "train_track: the critic needs values and returns, and the part lacks them; compute them first"
            )

    def _critic_metrics(self, part: Part, micro_metrics: list, steps: list[StepResult]) -> dict[str, float | None]:
        if self.critic is None:
            return {}
        statistics = value_statistics(part.values, part.returns, _trainable(part))
        return {**statistics, **critic_metrics(micro_metrics, steps)}

    def _with_proximal_policy(self, part: Part, mini_batches: list[torch.Tensor]) -> Part:
        """The part with `prox_logp` [T]: the policy's present log-probs of the tokens that are going to be trained.

        They are computed over the very micro-batches of the updates: rounding differs from one packing to another, and
        so the first update finds exactly its own log-probs.
        """
        plans = [self._micro_batches(part, samples) for samples in mini_batches]
        return replace(part, prox_logp=token_log_probs(self.actor, part, join_plans(plans, self.actor.shape.dp)))

    def _known_replay(self, part: Part) -> torch.Tensor:
        unknown = torch.full_like(part.text.log_probs, torch.nan)
        if part.prox_logp is None:
            return unknown
        return torch.where(self._learnt(part)[part.text.token_sample_index], part.prox_logp, unknown)

    def _note_replay(self, micro_batches: list[MicroBatch], found: list[dict[str, Metric]]) -> None:
        for batch, metrics in zip(micro_batches, found, strict=True):
            self.replay_logp[batch.token_positions] = metrics[REPLAY_LOGP].value.to(self.replay_logp)

    def _micro_batches(self, part: Part, samples: torch.Tensor) -> list[MicroBatch]:
        """Of those of the samples that a model can learn from: a critic learns from all that are graded."""
        return plan_for(self.actor, part, samples[self._learnt(part)[samples]], self.config)

    def _learnt(self, part: Part) -> torch.Tensor:
        """[N] bool: samples that are run through the model."""
        return _moves_policy(part, self.algorithm) if self.critic is None else _has_tokens(part, _trainable(part))

    def _plan_metrics(self, micro_batches: list[MicroBatch]) -> dict[str, Metric]:
        return plan_metrics(
            micro_batches, dp=self.actor.shape.dp, token_budget=self.config.micro_batch_tokens, cost=self.actor.cost
        )

    def _mini_batches(self, part: Part) -> list[torch.Tensor]:
        """Disjoint sample positions, whole groups dealt round in their order, one tensor for each update."""
        groups = torch.unique(part.text.group_ids, return_inverse=True)[1]
        updates = self.config.num_updates_per_batch
        return [torch.nonzero(groups % updates == update).flatten() for update in range(updates)]


def _trainable(part: Part) -> torch.Tensor:
    """[T] bool: generated tokens whose reward and rollout log-prob are finite."""
    text = part.text
    graded = torch.ones(len(part), dtype=torch.bool) if part.rewards is None else torch.isfinite(part.rewards)
    return text.loss_mask & torch.isfinite(text.log_probs) & graded[text.token_sample_index]


def _denominators(part: Part, samples: torch.Tensor) -> Denominators:
    """Counted once over the whole mini-batch, so that no split into micro-batches changes the loss."""
    text = part.text.select(samples)
    return count_denominators(_trainable(part)[part.text.token_positions(samples)], text.cu_seqlens)


def _moves_policy(part: Part, algorithm: PolicyAlgorithm) -> torch.Tensor:
    """[N] bool: samples with a gradient. Every loss here is proportional to the advantage; extra terms are not."""
    trainable = _trainable(part)
    if algorithm.zero_advantage_means_zero_gradient:
        trainable = trainable & (part.advantages != 0)
    return _has_tokens(part, trainable)


def _has_tokens(part: Part, tokens: torch.Tensor) -> torch.Tensor:
    """tokens [T] bool -> [N] bool: samples with at least one of them."""
    return part.text.sum_by_sample(tokens.long()) > 0


def _step_metrics(metrics: dict[str, float], steps: list[StepResult]) -> dict[str, float]:
    if not steps:
        return {}
    for name in metrics.keys() & {"loss", "actor_loss"}:
        metrics[name] /= len(steps)  # each update's loss is a sum over its own micro-batches
    return {
        **metrics,
        "grad_norm": sum(step.grad_norm for step in steps) / len(steps),
        "lr": steps[-1].lr,
    }
