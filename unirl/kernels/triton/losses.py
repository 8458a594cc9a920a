"""The losses of tokens as one kernel: what csrc/common/policy_loss.h says, in Triton."""

import math

import triton
import triton.language as tl

from unirl.kernels.loss_spec import LOSSES
from unirl.kernels.token_losses import MAX_LOG_RATIO as _MAX_LOG_RATIO

PPO, DRPO, SPO, DPPO, SAPO, CISPO = (tl.constexpr(kind) for kind in range(len(LOSSES)))
MAX_LOG_RATIO = tl.constexpr(_MAX_LOG_RATIO)
HALF_HEIGHT = tl.constexpr(math.acosh(3))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["rows"])
def token_losses(logps, terms, constants, result, flags, rows, KIND: tl.constexpr, TOKENS: tl.constexpr):
    """result [3, T] float64: ratio, loss, slope; flags [3, T] bytes: upper, lower, capped; of logps [T], terms [5, T].

    constants [6] float64: those of LossSpec. KIND: its kind. A token whose log-prob is not finite takes no part.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < rows
    logp = tl.load(logps + token, mask=here, other=0.0)
    old_logp = tl.load(terms + token, mask=here, other=0.0)
    anchor_logp = tl.load(terms + rows + token, mask=here, other=0.0)
    a = tl.load(terms + 2 * rows + token, mask=here, other=0.0)
    lowest, highest, cap = tl.load(constants), tl.load(constants + 1), tl.load(constants + 2)
    epsilon = tl.load(constants + 3)

    live = logp - logp == 0.0
    logp = tl.where(live, logp, anchor_logp)
    log_ratio = logp - anchor_logp
    ratio = tl.exp(tl.minimum(tl.maximum(log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))
    ratio_slope = tl.where(tl.abs(log_ratio) <= MAX_LOG_RATIO, ratio, 0.0)
    inside = tl.minimum(tl.maximum(ratio, lowest), highest)
    magnitude = tl.abs(a)
    capped = live & False
    if KIND == PPO:
        larger = tl.maximum(-a * ratio, -a * inside)
        bound = tl.where(magnitude == 0.0, 0.0, cap) * magnitude
        upper = (a > 0.0) & (ratio > highest)
        lower = (a < 0.0) & (ratio < lowest)
        capped = (larger > bound) & (magnitude > 0.0)
        loss = tl.where(capped, bound, larger)
        slope = tl.where(upper | lower | capped, 0.0, -a * ratio_slope)
    elif KIND == DRPO or KIND == SPO:  # noqa: SIM109 (Triton knows no `in`)
        shift = ratio - 1.0
        if KIND == DRPO:
            shift *= tl.exp(old_logp)
        loss = magnitude * shift * (ratio - 1.0) / (2.0 * epsilon) - a * ratio
        slope = (magnitude * shift / epsilon - a) * ratio_slope
        upper = (a > 0.0) & (shift > epsilon)
        lower = (a < 0.0) & (shift < -epsilon)
    elif KIND == DPPO:
        far = tl.abs(tl.exp(logp) - tl.exp(anchor_logp)) > epsilon
        upper = far & (a > 0.0) & (ratio > 1.0)
        lower = far & (a < 0.0) & (ratio < 1.0)
        loss = tl.where(upper | lower, 0.0, -a * ratio)
        slope = tl.where(upper | lower, 0.0, -a * ratio_slope)
    elif KIND == SAPO:
        tau = tl.where(a > 0.0, tl.load(constants + 4), tl.load(constants + 5))
        x = tau * (ratio - 1.0)
        loss = -a * (4.0 / tau) * sigmoid(x)
        slope = -4.0 * a * sigmoid(x) * sigmoid(-x) * ratio_slope
        upper = (a > 0.0) & (x > HALF_HEIGHT)
        lower = (a < 0.0) & (x < -HALF_HEIGHT)
    else:
        tl.static_assert(KIND == CISPO)
        slope = -a * inside
        loss = slope * logp
        upper = ratio > highest
        lower = ratio < lowest

    tl.store(result + token, ratio, mask=here)
    tl.store(result + rows + token, tl.where(live, loss, 0.0), mask=here)
    tl.store(result + 2 * rows + token, tl.where(live, slope, 0.0), mask=here)
    tl.store(flags + token, (upper & live).to(tl.uint8), mask=here)
    tl.store(flags + rows + token, (lower & live).to(tl.uint8), mask=here)
    tl.store(flags + 2 * rows + token, (capped & live).to(tl.uint8), mask=here)
