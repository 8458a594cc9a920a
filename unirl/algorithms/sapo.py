"""SAPO: a soft gate on the ratio in place of a clip."""

import math

import torch

from unirl.algorithms.algorithm import PolicyAlgorithm
from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ratio import RatioTerms
from unirl.algorithms.token_loss import TokenLoss


def _temperature(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    positive = terms.ratio.new_full((), config.sapo_tau_pos)
    return torch.where(terms.advantages > 0, positive, config.sapo_tau_neg)


def _sapo_loss(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A (arXiv 2511.20347)."""
    tau = _temperature(config, terms)
    return -terms.advantages * (4 / tau) * torch.sigmoid(tau * (terms.ratio - 1))


def _sapo_derivative(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-4 A s (1 - s) r, with s the sigmoid of the loss."""
    x = _temperature(config, terms) * (terms.ratio - 1)
    return -4 * terms.advantages * torch.sigmoid(x) * torch.sigmoid(-x) * terms.ratio_slope


def _sapo_limits(config: PolicyLossConfig, terms: RatioTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate falls to half its height at s (1 - s) = 1/8: tau |r - 1| = log(3 + 2 sqrt 2)."""
    far = math.acosh(3)
    x = _temperature(config, terms) * (terms.ratio - 1)
    return (terms.advantages > 0) & (x > far), (terms.advantages < 0) & (x < -far)


class SAPO(PolicyAlgorithm):
    """Soft adaptive policy optimisation."""

    token_loss = TokenLoss(loss=_sapo_loss, derivative=_sapo_derivative, limits=_sapo_limits)
