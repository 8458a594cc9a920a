"""Behaviour weights of the decoupled loss, and the filter on them."""

import math
from dataclasses import dataclass

import torch

from unirl.algorithms.config import PolicyLossConfig, RejectionConfig
from unirl.algorithms.packed import Packing

# Wide enough to change no weight of a sane batch; fp32 products with exp(20)-sized ratios stay finite.
_MAX_LOG_WEIGHT = 40.0


@dataclass(frozen=True)
class Behaviour:
    """weights [T]: factor of each token's surrogate, no graph. kept [T] bool: live tokens that the filter left."""

    weights: torch.Tensor
    kept: torch.Tensor


@torch.no_grad()
def behaviour(
    config: PolicyLossConfig,
    old_logp: torch.Tensor,
    prox_logp: torch.Tensor | None,
    live: torch.Tensor,
    packing: Packing,
) -> Behaviour:
    """old_logp, prox_logp [T], live [T] bool -> weights prox / rollout and the tokens kept (not decoupled: 1, all).

    Decoupled PPO: arXiv 2110.00641. Masking by ratio: IcePop; by binary KL: KPop; clamped weights: truncated
    importance sampling.
    """
    if not config.use_decoupled_loss:
        return Behaviour(torch.ones_like(old_logp), live)
    distance = prox_logp - old_logp
    rejection = config.rejection_sampling
    log_weights = distance
    if rejection is not None and rejection.metric == "ratio" and rejection.level == "sequence":
        log_weights = packing.spread(packing.mean(distance, live))
    weights = log_weights.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()
    if rejection is None:
        return Behaviour(weights, live)
    if rejection.action == "clamp":
        return Behaviour(weights.clamp(rejection.lower, rejection.upper), live)
    return Behaviour(weights, live & _inside(rejection, old_logp, prox_logp, live, packing))


def _inside(
    rejection: RejectionConfig, old_logp: torch.Tensor, prox_logp: torch.Tensor, live: torch.Tensor, packing: Packing
) -> torch.Tensor:
    """[T] bool: the metric of the token, or of its sequence, is within [lower, upper]."""
    metric = _token_metric(rejection.metric, old_logp, prox_logp)
    if rejection.level == "sequence":
        metric = packing.spread(_by_sequence(rejection.agg, metric, live, packing))
    lower, upper = -math.inf if rejection.lower is None else rejection.lower, rejection.upper
    if rejection.metric == "ratio":
        metric = metric.exp()
    return (metric >= lower) & (metric <= upper)


def _token_metric(name: str, old_logp: torch.Tensor, prox_logp: torch.Tensor) -> torch.Tensor:
    """Metric of each token [T]; ratio as its log, so that a sequence aggregates it in log space."""
    distance = prox_logp - old_logp
    match name:
        case "ratio" | "kl_k1":
            return distance
        case "kl_k2":
            return distance.square() / 2
        case "kl_k3":
            return torch.expm1(-distance) + distance
        case "binary_kl":
            return torch.maximum(_bernoulli_kl(prox_logp, old_logp), _bernoulli_kl(old_logp, prox_logp))
    raise ValueError(f"rejection_sampling.metric: found {name!r}")


def _bernoulli_kl(logp: torch.Tensor, logq: torch.Tensor) -> torch.Tensor:
    """KL [T] between Bernoulli(exp(logp)) and Bernoulli(exp(logq)): the token drawn, or any other.

    The probability of any other token counts as at least the rounding unit: a log-prob rounded to 0 says no more.
    """
    least = torch.finfo(logp.dtype).eps
    other_p, other_q = (-torch.expm1(logp)).clamp(min=least), (-torch.expm1(logq)).clamp(min=least)
    return logp.exp() * (logp - logq) + other_p * (other_p.log() - other_q.log())


def _by_sequence(agg: str, metric: torch.Tensor, live: torch.Tensor, packing: Packing) -> torch.Tensor:
    match agg:
        case "sum":
            return packing.sum(torch.where(live, metric, 0))
        case "mean":
            return packing.mean(metric, live)
        case "max":
            return packing.max(metric, live)
    raise ValueError(f"rejection_sampling.agg: found {agg!r}")
