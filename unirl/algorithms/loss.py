"""The policy loss of a packed batch: token losses, weighted, filtered and summed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unirl.algorithms.aggregate import Denominators, token_weights
from unirl.algorithms.config import PolicyLossConfig, loss_config_problems, required_inputs
from unirl.algorithms.finite import finite_values
from unirl.algorithms.kl import kl_derivative, kl_estimate
from unirl.algorithms.metrics import Metric, masked_max, masked_mean
from unirl.algorithms.packed import Packing
from unirl.algorithms.ratio import RatioTerms, logp_derivative, ratio_terms
from unirl.algorithms.registry import algorithm_class
from unirl.algorithms.rejection import Behaviour, behaviour
from unirl.algorithms.token_loss import TokenLoss
from unirl.algorithms.validation import as_config


@dataclass(frozen=True)
class PolicyLossOutput:
    """loss: 0-dim, divided by the denominators, with graph.

    per_token [T]: the loss of each token before it is divided (weight, KL and entropy terms included), 0 where masked.
    metrics: sums and counts over the unmasked tokens, see `merge_metrics`.
    """

    loss: torch.Tensor
    per_token: torch.Tensor
    metrics: dict[str, Metric]


def policy_loss(
    config: PolicyLossConfig | Mapping[str, Any],
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prox_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    denominators: Denominators | None = None,
) -> PolicyLossOutput:
    """The loss named by `config.loss` on N packed sequences of T tokens in all.

    config: a `PolicyLossConfig`, or a dict of its keys.
    logp, old_logp, advantages [T] float: log-probs in nats of the policy and of the rollout policy; all is computed in
        fp32, or in the widest dtype given. Gradient flows to `logp`, and to `entropy` where it has a weight.
    loss_mask [T] bool: False leaves a token out.
    cu_seqlens [N+1] integer: bounds of the sequences, which may be empty.
    prox_logp [T]: proximal policy (`use_decoupled_loss`, `old_logp_source: recompute`).
    ref_logp [T]: reference policy (`kl_coef`; else only the metric of its KL).
    entropy [T]: of the policy at each token, in nats (`entropy_coef`; else only its metric).
    denominators: counts over the whole global batch; None counts this call's own.

    A token with a value that is not finite is dropped from the numerator, gets gradient 0 and is counted in the metric
    `nonfinite_tokens`. Raises ValueError on a config that breaks a rule, a missing input, or shapes that do not fit.
    """
    call = _prepare(
        config, logp, old_logp, advantages, loss_mask, cu_seqlens, prox_logp, ref_logp, entropy, denominators
    )
    weighted = call.behaviour.weights * call.token_loss.loss(call.config, call.terms)
    surrogate = torch.where(call.behaviour.kept, weighted, 0)
    per_token = surrogate
    if call.config.kl_coef > 0:
        per_token = per_token + call.config.kl_coef * kl_estimate(
            call.config.kl_estimator, call.terms.logp, call.ref_logp
        )
    if call.config.entropy_coef > 0:
        per_token = per_token - call.config.entropy_coef * call.entropy
    loss = (call.weights * per_token).sum()
    return PolicyLossOutput(loss, per_token, _metrics(call, loss, surrogate))


@torch.no_grad()
def policy_loss_derivative(
    config: PolicyLossConfig | Mapping[str, Any],
    *,
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prox_logp: torch.Tensor | None = None,
    ref_logp: torch.Tensor | None = None,
    denominators: Denominators | None = None,
) -> torch.Tensor:
    """d loss / d logp [T] of `policy_loss` in closed form, without autograd; arguments as there.

    The entropy bonus has no part in it: its gradient goes through `entropy`, not through `logp`.
    """
    config = as_config(PolicyLossConfig, config)
    entropy = torch.zeros_like(logp) if config.entropy_coef > 0 else None
    call = _prepare(
        config, logp, old_logp, advantages, loss_mask, cu_seqlens, prox_logp, ref_logp, entropy, denominators
    )
    derivative = call.token_loss.derivative(config, call.terms) * call.behaviour.weights * call.weights
    derivative = torch.where(call.behaviour.kept, derivative, 0)
    derivative = logp_derivative(config, derivative, call.live, call.packing)
    if config.kl_coef > 0:
        slope = kl_derivative(config.kl_estimator, call.terms.logp, call.ref_logp)
        derivative = derivative + config.kl_coef * call.weights * slope
    return torch.where(call.live, derivative, 0)


@dataclass(frozen=True)
class SurrogateTerms:
    """The constants of a loss sum_t weights_t l(logp_t) - entropy_weights_t H_t, all [T]; 0 where a token has no part.

    old_logp, anchor_logp, advantages: what the token loss l takes beside `logp`, as in `RatioTerms`.
    weights: everything that multiplies it: behaviour weight, 0 where rejected, over the denominator.
    entropy_weights: None without an entropy bonus. live bool: tokens that take part.
    """

    old_logp: torch.Tensor
    anchor_logp: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    entropy_weights: torch.Tensor | None
    live: torch.Tensor


@torch.no_grad()
def surrogate_terms(
    config: PolicyLossConfig | Mapping[str, Any],
    *,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prox_logp: torch.Tensor | None = None,
    denominators: Denominators | None = None,
) -> SurrogateTerms:
    """What is known of `policy_loss` before the log-probs are; arguments as there.

    Raises ValueError where they do not make up the rest of the loss: ratios of whole sequences, a KL to the reference.
    """
    config = as_config(PolicyLossConfig, config)
    if config.importance_sampling_level != "token" or config.kl_coef > 0:
        raise ValueError(
            "surrogate_terms: the loss is not a sum over single tokens without reference KL: found "
            f"importance_sampling_level={config.importance_sampling_level}, kl_coef={config.kl_coef}"
        )
    entropy = torch.zeros_like(old_logp) if config.entropy_coef > 0 else None
    call = _prepare(
        config, old_logp, old_logp, advantages, loss_mask, cu_seqlens, prox_logp, None, entropy, denominators
    )
    return SurrogateTerms(
        old_logp=call.terms.old_logp,
        anchor_logp=call.terms.anchor_logp,
        advantages=call.terms.advantages,
        weights=torch.where(call.behaviour.kept, call.behaviour.weights * call.weights, 0),
        entropy_weights=config.entropy_coef * call.weights if config.entropy_coef > 0 else None,
        live=call.live,
    )


@dataclass(frozen=True)
class _Call:
    """Checked inputs of one call. live [T] bool: unmasked tokens all of whose values are finite.

    rollout_logp [T]: of the rollout policy, whatever anchors the ratio. prox_logp [T]: None where it is not needed.
    """

    config: PolicyLossConfig
    token_loss: TokenLoss
    packing: Packing
    loss_mask: torch.Tensor
    live: torch.Tensor
    terms: RatioTerms
    behaviour: Behaviour
    weights: torch.Tensor
    rollout_logp: torch.Tensor
    prox_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None
    entropy: torch.Tensor | None


def _prepare(
    config, logp, old_logp, advantages, loss_mask, cu_seqlens, prox_logp, ref_logp, entropy, denominators
) -> _Call:
    config = as_config(PolicyLossConfig, config)
    if problems := loss_config_problems(config):
        raise ValueError(f"policy loss: {'; '.join(problems)}")
    values = {"logp": logp, "old_logp": old_logp, "advantages": advantages}
    needed = required_inputs(config)
    # A proximal policy that the loss does not have cannot cost it a token either.
    values |= {"prox_logp": prox_logp if "prox_logp" in needed else None, "ref_logp": ref_logp, "entropy": entropy}
    values = {name: value for name, value in values.items() if value is not None}
    _check_inputs(config, values, loss_mask, needed)
    mask = loss_mask.bool()
    packing = Packing.from_cu_seqlens(cu_seqlens, mask.numel())
    values, live = finite_values(values, mask, differentiable=("logp", "entropy"))
    rollout_logp, prox_logp = values["old_logp"], values.get("prox_logp")
    # With a recomputed source the proximal policy takes the place of the rollout policy in every formula.
    old_logp = prox_logp if config.old_logp_source == "recompute" else rollout_logp
    anchor_logp = prox_logp if config.use_decoupled_loss else old_logp
    terms = ratio_terms(config, values["logp"], old_logp, anchor_logp, values["advantages"], live, packing)
    return _Call(
        config=config,
        token_loss=algorithm_class(config.loss).token_loss,
        packing=packing,
        loss_mask=mask,
        live=live,
        terms=terms,
        behaviour=behaviour(config, rollout_logp, prox_logp, live, packing),
        weights=torch.where(live, token_weights(config, mask, packing, denominators, values["logp"].dtype), 0),
        rollout_logp=rollout_logp,
        prox_logp=prox_logp,
        ref_logp=values.get("ref_logp"),
        entropy=values.get("entropy"),
    )


def _check_inputs(config: PolicyLossConfig, values: dict[str, torch.Tensor], loss_mask: torch.Tensor, needed) -> None:
    reasons = {
        "prox_logp": "use_decoupled_loss" if config.use_decoupled_loss else "old_logp_source",
        "ref_logp": "kl_coef",
        "entropy": "entropy_coef",
    }
    for name in needed:
        if name not in values:
            raise ValueError(
                f"policy loss: {name} is missing, and {reasons[name]}={getattr(config, reasons[name])} needs it"
            )
    for name, value in {**values, "loss_mask": loss_mask}.items():
        if value.dim() != 1 or value.shape != values["logp"].shape:
            raise ValueError(
                f"policy loss: {name}: found shape {tuple(value.shape)}, "
                f"expected [T] like logp, {tuple(values['logp'].shape)}"
            )


@torch.no_grad()
def _metrics(call: _Call, loss: torch.Tensor, surrogate: torch.Tensor) -> dict[str, Metric]:
    terms, live = call.terms, call.live
    upper, lower = call.token_loss.limits(call.config, terms)
    replay_logp = terms.logp if call.prox_logp is None else call.prox_logp
    means = {
        "ratio_mean": terms.ratio,
        "approx_kl": torch.expm1(terms.log_ratio) - terms.log_ratio,
        "approx_kl_abs": terms.log_ratio.abs(),
        "clipfrac_upper": upper,
        "clipfrac_lower": lower,
        "clip_ratio": upper | lower,
        "rollout_replay_logp_absdiff_mean": (replay_logp - call.rollout_logp).abs(),
        **call.token_loss.diagnostics(call.config, terms),
    }
    if call.entropy is not None:
        means["entropy"] = call.entropy
    if call.ref_logp is not None:
        means["ref_kl"] = kl_estimate(call.config.kl_estimator, terms.logp, call.ref_logp)
    if call.config.use_decoupled_loss:
        means["behave_approx_kl_abs"] = (call.prox_logp - call.rollout_logp).abs()
        means["behave_weight_mean"] = call.behaviour.weights
        means["behave_cap_ratio"] = ~call.behaviour.kept
    metrics = {name: masked_mean(value.to(loss.dtype), live) for name, value in means.items()}
    metrics["loss"] = Metric(loss.detach(), live.sum(), "sum")
    metrics["actor_loss"] = Metric((call.weights * surrogate.detach()).sum(), live.sum(), "sum")
    metrics["ratio_max"] = masked_max(terms.ratio, live)
    metrics["nonfinite_tokens"] = Metric((call.loss_mask & ~live).sum(), call.loss_mask.sum(), "sum")
    return metrics
