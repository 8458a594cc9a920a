"""A forward pass over samples that were drawn already: what a policy says of their tokens."""

from collections.abc import Sequence
from typing import Protocol

import torch

from unirl.config.schema import StackConfig
from unirl.train.packing import MicroBatch, PlannedModel, plan_for
from unirl.types import Part


class LogProbPolicy(PlannedModel, Protocol):
    """A policy as far as a pass needs it."""

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(log-probs [R], entropies [R]) of the response tokens of each micro-batch."""


def token_log_probs(policy: LogProbPolicy, part: Part, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Log-probs [T] float32 of the tokens of `part` under `policy`, run over micro-batches planned from `part`.

    0 on prompt tokens and on the tokens of samples that are in none of the micro-batches.
    """
    logp = torch.zeros_like(part.text.log_probs)
    if micro_batches:
        for batch, (found, _) in zip(micro_batches, policy.log_probs(micro_batches), strict=True):
            logp[batch.token_positions] = found
    return logp


def log_prob_pass(policy: LogProbPolicy, part: Part, config: StackConfig) -> torch.Tensor:
    """Log-probs [T] float32 of the generated tokens of all samples of `part` under `policy`; 0 on prompt tokens."""
    return token_log_probs(policy, part, plan_for(policy, part, torch.arange(len(part)), config))
