"""DRPO: a smooth, advantage-weighted quadratic penalty on the shift of a token's probability."""

import torch

from unirl.algorithms.algorithm import PolicyAlgorithm
from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ratio import RatioTerms
from unirl.algorithms.token_loss import TokenLoss


def _drpo_penalty(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """|A| mu (r - 1)^2 / (2 epsilon): the quadratic term alone; mu is the rollout probability of the token."""
    mu = terms.old_logp.exp()
    return terms.advantages.abs() * mu * (terms.ratio - 1).square() / (2 * config.drpo_epsilon)


def _drpo_loss(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A r + |A| mu (r - 1)^2 / (2 epsilon), no clipping (arXiv 2606.09821)."""
    return -terms.advantages * terms.ratio + _drpo_penalty(config, terms)


def _drpo_derivative(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """(-A + |A| mu (r - 1) / epsilon) r: changes its sign where the probability has shifted by epsilon."""
    pull = terms.advantages.abs() * terms.old_logp.exp() * (terms.ratio - 1) / config.drpo_epsilon
    return (pull - terms.advantages) * terms.ratio_slope


def _drpo_limits(config: PolicyLossConfig, terms: RatioTerms) -> tuple[torch.Tensor, torch.Tensor]:
    shift = terms.old_logp.exp() * (terms.ratio - 1)
    return (
        (terms.advantages > 0) & (shift > config.drpo_epsilon),
        (terms.advantages < 0) & (shift < -config.drpo_epsilon),
    )


class DRPO(PolicyAlgorithm):
    """Divergence-regularised policy optimisation. Its ratio is anchored on the rollout's own log-probs."""

    supports_multi_update = False
    token_loss = TokenLoss(
        loss=_drpo_loss,
        derivative=_drpo_derivative,
        limits=_drpo_limits,
        diagnostics=lambda config, terms: {"drpo_penalty_mean": _drpo_penalty(config, terms)},
    )
