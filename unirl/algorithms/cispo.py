"""CISPO: the log-prob itself, weighted by the clipped ratio, so that no token loses its gradient."""

import torch

from unirl.algorithms.algorithm import PolicyAlgorithm
from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ppo import clip_range
from unirl.algorithms.ratio import RatioTerms
from unirl.algorithms.token_loss import TokenLoss


def _cispo_loss(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A logp clip(r), no gradient through the clipped ratio (arXiv 2506.13585, eq. 4 and 5)."""
    return -terms.advantages * terms.logp * terms.ratio.detach().clamp(*clip_range(config))


def _cispo_derivative(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A clip(r)."""
    return -terms.advantages * terms.ratio.clamp(*clip_range(config))


def _cispo_limits(config: PolicyLossConfig, terms: RatioTerms) -> tuple[torch.Tensor, torch.Tensor]:
    lowest, highest = clip_range(config)
    return terms.ratio > highest, terms.ratio < lowest


class CISPO(PolicyAlgorithm):
    """Clipped importance-sampling weight policy optimisation."""

    token_loss = TokenLoss(loss=_cispo_loss, derivative=_cispo_derivative, limits=_cispo_limits)
