"""SPO: a smooth, advantage-weighted quadratic penalty on the shift of the ratio."""

import torch

from unirl.algorithms.algorithm import PolicyAlgorithm
from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ratio import RatioTerms
from unirl.algorithms.token_loss import TokenLoss


def _spo_loss(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A r + |A| (r - 1)^2 / (2 epsilon) (arXiv 2401.16025)."""
    penalty = terms.advantages.abs() * (terms.ratio - 1).square() / (2 * config.spo_epsilon)
    return -terms.advantages * terms.ratio + penalty


def _spo_derivative(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """(-A + |A| (r - 1) / epsilon) r: changes its sign where the ratio has shifted by epsilon."""
    pull = terms.advantages.abs() * (terms.ratio - 1) / config.spo_epsilon
    return (pull - terms.advantages) * terms.ratio_slope


def _spo_limits(config: PolicyLossConfig, terms: RatioTerms) -> tuple[torch.Tensor, torch.Tensor]:
    shift = terms.ratio - 1
    return (
        (terms.advantages > 0) & (shift > config.spo_epsilon),
        (terms.advantages < 0) & (shift < -config.spo_epsilon),
    )


class SPO(PolicyAlgorithm):
    """Simple policy optimisation."""

    token_loss = TokenLoss(loss=_spo_loss, derivative=_spo_derivative, limits=_spo_limits)
