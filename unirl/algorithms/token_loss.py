"""What a policy loss is: a function of the terms of each token, its derivative, and where its trust region ends."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ratio import RatioTerms

TokenFunction = Callable[[PolicyLossConfig, RatioTerms], torch.Tensor]


def _no_diagnostics(config: PolicyLossConfig, terms: RatioTerms) -> dict[str, torch.Tensor]:
    return {}


@dataclass(frozen=True)
class TokenLoss:
    """A policy loss per token.

    loss: [T], differentiable in `terms.logp`.
    derivative: [T], closed form of d loss / d log ratio of the token (of its sequence, with sequence-level ratios).
    limits: two [T] bool: tokens beyond the upper end of the trust region (the loss no longer pushes them up) and
        beyond the lower end.
    diagnostics: further values [T] by metric name, whose means over the unmasked tokens are reported.
    """

    loss: TokenFunction
    derivative: TokenFunction
    limits: Callable[[PolicyLossConfig, RatioTerms], tuple[torch.Tensor, torch.Tensor]]
    diagnostics: Callable[[PolicyLossConfig, RatioTerms], dict[str, torch.Tensor]] = _no_diagnostics
