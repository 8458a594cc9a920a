"""DPPO: tokens whose probability has shifted too far are no longer pushed on (Binary-TV mask)."""

import torch

from unirl.algorithms.algorithm import PolicyAlgorithm
from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ratio import RatioTerms
from unirl.algorithms.token_loss import TokenLoss


def _dppo_loss(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A r, and 0 where A (r - 1) > 0 and |pi - anchor| > delta, both probabilities of the token (arXiv 2602.04879)."""
    upper, lower = _dppo_limits(config, terms)
    return torch.where(upper | lower, 0, -terms.advantages * terms.ratio)


def _dppo_derivative(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A r, and 0 where masked: no gradient goes through the mask."""
    upper, lower = _dppo_limits(config, terms)
    return torch.where(upper | lower, 0, -terms.advantages * terms.ratio_slope)


def _dppo_limits(config: PolicyLossConfig, terms: RatioTerms) -> tuple[torch.Tensor, torch.Tensor]:
    far = (terms.logp.detach().exp() - terms.anchor_logp.exp()).abs() > config.dppo_delta
    return far & (terms.advantages > 0) & (terms.ratio > 1), far & (terms.advantages < 0) & (terms.ratio < 1)


class DPPO(PolicyAlgorithm):
    """Divergence proximal policy optimisation, Binary-TV variant."""

    token_loss = TokenLoss(loss=_dppo_loss, derivative=_dppo_derivative, limits=_dppo_limits)
