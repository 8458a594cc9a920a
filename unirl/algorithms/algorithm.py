"""`PolicyAlgorithm`: a policy loss driven over the micro-batches of one optimizer step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from unirl.algorithms.aggregate import Denominators
from unirl.algorithms.config import PolicyLossConfig, loss_config_problems
from unirl.algorithms.loss import SurrogateTerms, policy_loss, surrogate_terms
from unirl.algorithms.metrics import Metric
from unirl.algorithms.registry import algorithm_class
from unirl.algorithms.token_loss import TokenLoss
from unirl.algorithms.validation import as_config


class LossMicroBatch(Protocol):
    """What the loss needs of a micro-batch of R response tokens in N samples.

    old_logp, advantages [R] float32; loss_mask [R] bool; loss_cu_seqlens [N+1] int64.
    """

    old_logp: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_cu_seqlens: torch.Tensor


LossFunction = Callable[[LossMicroBatch, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, dict[str, Metric]]]


class LossActor(Protocol):
    """The policy under training, as far as an algorithm drives it."""

    def forward_backward(
        self, micro_batches: Sequence[LossMicroBatch], loss_fn: LossFunction
    ) -> list[dict[str, Metric]]:
        """Accumulate the gradients of the sum of `loss_fn(micro_batch, logp [R], entropy [R])` over the micro-batches.

        Returns the metrics of each of them.
        """


REPLAY_LOGP = "replay_logp"
"""Metric of a micro-batch: the log-probs [R] that its loss was computed from."""


@dataclass(frozen=True)
class PolicyLossFunction:
    """The policy loss of a micro-batch, for an actor to call; it may compute the same from `config` in its own way.

    denominators: as of `PolicyAlgorithm.compute_loss_and_backward`.
    """

    config: PolicyLossConfig
    denominators: Denominators

    def __call__(
        self, micro_batch: LossMicroBatch, logp: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """logp, entropy [R] -> the loss, a scalar with graph, and its metrics; `REPLAY_LOGP` among them is `logp`."""
        output = policy_loss(
            self.config,
            logp=logp,
            ref_logp=getattr(micro_batch, "ref_logp", None),
            entropy=entropy,
            **self._constants(micro_batch),
        )
        replayed = Metric(logp.detach(), micro_batch.loss_mask.sum(), "none")
        return output.loss, {**output.metrics, REPLAY_LOGP: replayed}

    def surrogate_terms(self, micro_batch: LossMicroBatch) -> SurrogateTerms:
        """What the loss of each token [R] is made of beside its log-prob and entropy."""
        return surrogate_terms(self.config, **self._constants(micro_batch))

    def _constants(self, micro_batch: LossMicroBatch) -> dict[str, Any]:
        return {
            "old_logp": micro_batch.old_logp,
            "advantages": micro_batch.advantages,
            "loss_mask": micro_batch.loss_mask,
            "cu_seqlens": micro_batch.loss_cu_seqlens,
            "prox_logp": getattr(micro_batch, "prox_logp", None),
            "denominators": self.denominators,
        }


class PolicyAlgorithm:
    """One policy loss with its config.

    token_loss: the loss of a token, see `TokenLoss`.
    supports_multi_update: whether one rollout batch may be trained on several times.
    """

    token_loss: ClassVar[TokenLoss]
    supports_multi_update: ClassVar[bool] = True

    def __init__(self, config: PolicyLossConfig | Mapping[str, Any] | None = None, **keys: Any):
        """config: a config of this loss, or a dict of its keys, or these by name: `DRPO(drpo_epsilon=1)`.

        Raises ValueError where the config breaks a rule of its loss, or is that of another loss.
        """
        if config is None or isinstance(config, Mapping):
            config = as_config(PolicyLossConfig, {"loss": type(self).__name__.lower(), **(config or {}), **keys})
        elif keys:
            raise TypeError(f"{type(self).__name__}: found a {type(config).__name__} and keys, expected one of them")
        if problems := loss_config_problems(config):
            raise ValueError(f"algorithm: {'; '.join(problems)}")
        if not isinstance(self, algorithm_class(config.loss)):
            raise ValueError(
                f"{type(self).__name__}: found a config of loss {config.loss}; make_algorithm has its class"
            )
        self.config = config

    @property
    def zero_advantage_means_zero_gradient(self) -> bool:
        """Whether a sample with advantages of 0 has no gradient: not so with an entropy bonus or a reference KL."""
        return self.config.entropy_coef == 0 and self.config.kl_coef == 0

    def compute_loss_and_backward(
        self, actor: LossActor, micro_batches: Sequence[LossMicroBatch], denominators: Denominators
    ) -> list[dict[str, Metric]]:
        """Accumulate the gradients of one optimizer step; returns the metrics of each micro-batch.

        denominators: counted over all micro-batches of the step and all ranks, so that any split of the batch
        gives the same gradient.
        """

        return actor.forward_backward(micro_batches, PolicyLossFunction(self.config, denominators))


def make_algorithm(config: PolicyLossConfig | Mapping[str, Any]) -> PolicyAlgorithm:
    """The algorithm that `config.loss` names; a dict of keys will do. Raises ValueError where it breaks a rule."""
    config = as_config(PolicyLossConfig, config)
    if problems := loss_config_problems(config):
        raise ValueError(f"algorithm: {'; '.join(problems)}")
    return algorithm_class(config.loss)(config)
