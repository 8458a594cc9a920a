"""PPO: the clipped ratio, with asymmetric and dual clip; with sequence-level ratios it is GSPO."""

import torch

from unirl.algorithms.algorithm import PolicyAlgorithm
from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.ratio import RatioTerms
from unirl.algorithms.token_loss import TokenLoss


def clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """Lowest and highest ratio within the clip."""
    return 1 - config.eps_clip, 1 + (config.eps_clip_higher or config.eps_clip)


def _clipped(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    return torch.maximum(-terms.advantages * terms.ratio, -terms.advantages * terms.ratio.clamp(*clip_range(config)))


def _ppo_loss(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """max(-A r, -A clip(r)) (arXiv 1707.06347, eq. 7), at most c_clip |A| (dual clip, arXiv 1912.09729, eq. 5)."""
    loss = _clipped(config, terms)
    return loss if config.c_clip is None else torch.minimum(loss, config.c_clip * terms.advantages.abs())


def _ppo_derivative(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    """-A r, and 0 where a clip is active."""
    upper, lower = _ppo_limits(config, terms)
    flat = upper | lower | _dual_clipped(config, terms)
    return torch.where(flat, 0, -terms.advantages * terms.ratio_slope)


def _ppo_limits(config: PolicyLossConfig, terms: RatioTerms) -> tuple[torch.Tensor, torch.Tensor]:
    lowest, highest = clip_range(config)
    return (terms.advantages > 0) & (terms.ratio > highest), (terms.advantages < 0) & (terms.ratio < lowest)


def _dual_clipped(config: PolicyLossConfig, terms: RatioTerms) -> torch.Tensor:
    if config.c_clip is None:
        return torch.zeros_like(terms.ratio, dtype=torch.bool)
    return _clipped(config, terms) > config.c_clip * terms.advantages.abs()


def _ppo_diagnostics(config: PolicyLossConfig, terms: RatioTerms) -> dict[str, torch.Tensor]:
    return {} if config.c_clip is None else {"dual_clip_ratio": _dual_clipped(config, terms).to(terms.ratio.dtype)}


class PPO(PolicyAlgorithm):
    """PPO-clip; GRPO, Dr. GRPO, RLOO, LitePPO, DAPO and GSPO are settings of it."""

    token_loss = TokenLoss(loss=_ppo_loss, derivative=_ppo_derivative, limits=_ppo_limits, diagnostics=_ppo_diagnostics)
