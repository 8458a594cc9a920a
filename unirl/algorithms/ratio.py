"""The ratio of policy to anchor, per token or per sequence."""

from dataclasses import dataclass

import torch

from unirl.algorithms.config import PolicyLossConfig
from unirl.algorithms.packed import Packing

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class RatioTerms:
    """What a token loss is made of; all [T], and 0 (ratio: 1) at tokens that take no part.

    logp, old_logp, anchor_logp: policy, rollout policy, and the anchor of the ratio.
    advantages: of the token, or with sequence-level ratios the mean over its sequence.
    log_ratio: log ratio of the token, clamped to [-20, 20].
    ratio: exp of the clamped log ratio of the token, or of the mean over its sequence.
    ratio_slope: d ratio / d (unclamped log ratio): `ratio`, and 0 where the clamp is active. No graph.
    """

    logp: torch.Tensor
    old_logp: torch.Tensor
    anchor_logp: torch.Tensor
    advantages: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    ratio_slope: torch.Tensor


def ratio_terms(
    config: PolicyLossConfig,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    anchor_logp: torch.Tensor,
    advantages: torch.Tensor,
    live: torch.Tensor,
    packing: Packing,
) -> RatioTerms:
    """All [T]; `live` bool says which tokens enter the means over a sequence (GSPO, arXiv 2507.18071, eq. 7)."""
    token_log_ratio = log_ratio = logp - anchor_logp
    if config.importance_sampling_level == "sequence":
        log_ratio = torch.where(live, packing.spread(packing.mean(log_ratio, live)), 0)
        advantages = torch.where(live, packing.spread(packing.mean(advantages, live)), 0)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return RatioTerms(
        logp=logp,
        old_logp=old_logp,
        anchor_logp=anchor_logp,
        advantages=advantages,
        log_ratio=token_log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
        ratio=ratio,
        ratio_slope=torch.where(log_ratio.detach().abs() <= MAX_LOG_RATIO, ratio.detach(), 0),
    )


def logp_derivative(
    config: PolicyLossConfig, derivative: torch.Tensor, live: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """Derivatives [T] of weighted token losses, each with respect to its own log ratio, -> d sum / d logp [T].

    With sequence-level ratios each live token moves the mean log ratio of its sequence by 1 / (live tokens).
    """
    if config.importance_sampling_level == "sequence":
        return torch.where(live, packing.spread(packing.mean(derivative, live)), 0)
    return derivative
