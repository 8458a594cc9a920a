"""Policy losses of tokens and their derivatives in closed form: what csrc/common/policy_loss.h says, in plain torch.

The formulas and their sources are those of unirl/algorithms/{ppo,drpo,spo,dppo,sapo,cispo}.py.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.kernels.loss_spec import LossSpec

MAX_LOG_RATIO = 20.0


TERMS = ("old_logp", "anchor_logp", "advantages", "weights", "entropy_weights")
"""What a fused kernel needs of each token beside its row of logits, in this order, [5, T] float64."""
WEIGHT, ENTROPY_WEIGHT = TERMS.index("weights"), TERMS.index("entropy_weights")


@dataclass(frozen=True)
class TokenLosses:
    """All [T]. slope: d loss / d logp. upper, lower: beyond an end of the trust region. capped: by the dual clip."""

    ratio: Tensor
    loss: Tensor
    slope: Tensor
    upper: Tensor
    lower: Tensor
    capped: Tensor


@dataclass(frozen=True)
class _Terms:
    logp: Tensor
    old_logp: Tensor
    anchor_logp: Tensor
    advantages: Tensor


def token_losses(spec: LossSpec, logp: Tensor, terms: Tensor) -> TokenLosses:
    """logp [T], terms [5, T] float64, see TERMS, of which the weights are not read -> losses, float64.

    The log ratio is clamped to [-20, 20]; beyond, the ratio has no slope. A token whose log-prob is not finite takes
    no part: ratio 1, all else 0.
    """
    live = logp.isfinite()
    old_logp, anchor_logp, advantages = terms[:3]
    losses = _losses(spec, _Terms(torch.where(live, logp, anchor_logp), old_logp, anchor_logp, advantages))
    return TokenLosses(
        ratio=losses.ratio,  # of equal log-probs
        loss=torch.where(live, losses.loss, 0.0),
        slope=torch.where(live, losses.slope, 0.0),
        upper=losses.upper & live,
        lower=losses.lower & live,
        capped=losses.capped & live,
    )


def _losses(spec: LossSpec, terms: _Terms) -> TokenLosses:
    log_ratio = terms.logp - terms.anchor_logp
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio_slope = torch.where(log_ratio.abs() <= MAX_LOG_RATIO, ratio, 0.0)
    match spec.loss:
        case "ppo":
            return _clipped_ratio(spec, terms, ratio, ratio_slope)
        case "drpo":
            loss, slope, upper, lower = _quadratic(spec, terms, ratio, ratio_slope, terms.old_logp.exp())
        case "spo":
            loss, slope, upper, lower = _quadratic(spec, terms, ratio, ratio_slope, torch.ones_like(ratio))
        case "dppo":
            loss, slope, upper, lower = _masked_shift(spec, terms, ratio, ratio_slope)
        case "sapo":
            loss, slope, upper, lower = _gated(spec, terms, ratio, ratio_slope)
        case "cispo":
            slope = -terms.advantages * ratio.clamp(spec.lowest, spec.highest)
            loss, upper, lower = slope * terms.logp, ratio > spec.highest, ratio < spec.lowest
    return TokenLosses(ratio, loss, slope, upper, lower, torch.zeros_like(upper))


def _clipped_ratio(spec: LossSpec, terms: _Terms, ratio: Tensor, ratio_slope: Tensor) -> TokenLosses:
    """max(-A r, -A clip(r)), at most cap |A|; no slope where a clip is active."""
    a = terms.advantages
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(spec.lowest, spec.highest))
    upper, lower = (a > 0) & (ratio > spec.highest), (a < 0) & (ratio < spec.lowest)
    bound = spec.cap * a.abs()  # NaN for no cap and A = 0: then nothing is capped either
    capped = loss > bound
    slope = torch.where(upper | lower | capped, 0.0, -a * ratio_slope)
    return TokenLosses(ratio, torch.where(capped, bound, loss), slope, upper, lower, capped)


def _quadratic(spec: LossSpec, terms: _Terms, ratio: Tensor, ratio_slope: Tensor, scale: Tensor):
    """-A r + |A| scale (r - 1)^2 / (2 epsilon): scale is the rollout probability (drpo) or 1 (spo)."""
    a, shift = terms.advantages, scale * (ratio - 1)
    loss = -a * ratio + a.abs() * shift * (ratio - 1) / (2 * spec.epsilon)
    slope = (a.abs() * shift / spec.epsilon - a) * ratio_slope
    return loss, slope, (a > 0) & (shift > spec.epsilon), (a < 0) & (shift < -spec.epsilon)


def _masked_shift(spec: LossSpec, terms: _Terms, ratio: Tensor, ratio_slope: Tensor):
    """-A r, and nothing where the probability of the token has shifted too far in the direction that A pushes."""
    a = terms.advantages
    far = (terms.logp.exp() - terms.anchor_logp.exp()).abs() > spec.epsilon
    upper, lower = far & (a > 0) & (ratio > 1), far & (a < 0) & (ratio < 1)
    masked = upper | lower
    return torch.where(masked, 0.0, -a * ratio), torch.where(masked, 0.0, -a * ratio_slope), upper, lower


def _gated(spec: LossSpec, terms: _Terms, ratio: Tensor, ratio_slope: Tensor):
    """-A (4 / tau) sigmoid(x), x = tau (r - 1); the gate has fallen to half its height at |x| = acosh(3)."""
    a = terms.advantages
    tau = torch.where(a > 0, spec.tau_pos, torch.full_like(a, spec.tau_neg))
    x = tau * (ratio - 1)
    loss = -a * (4 / tau) * torch.sigmoid(x)
    slope = -4 * a * torch.sigmoid(x) * torch.sigmoid(-x) * ratio_slope
    return loss, slope, (a > 0) & (x > math.acosh(3)), (a < 0) & (x < -math.acosh(3))
