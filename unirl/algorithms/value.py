"""The loss of a critic: squared error of its values to the returns, clipped around the old values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unirl.algorithms.aggregate import Denominators, token_weights
from unirl.algorithms.config import ValueLossConfig, value_loss_config_problems
from unirl.algorithms.finite import finite_values
from unirl.algorithms.metrics import Metric, masked_mean
from unirl.algorithms.packed import Packing
from unirl.algorithms.validation import as_config


@dataclass(frozen=True)
class ValueLossOutput:
    """loss: 0-dim, divided by the denominators, with graph. per_token [T]: before it is divided, 0 where masked.

    metrics: sums and counts over the unmasked tokens, see `merge_metrics`.
    """

    loss: torch.Tensor
    per_token: torch.Tensor
    metrics: dict[str, Metric]


def value_loss(
    config: ValueLossConfig | Mapping[str, Any],
    *,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    denominators: Denominators | None = None,
) -> ValueLossOutput:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of each token, c = `value_clip`; null: 1/2 (V - R)^2.

    The clipping is that of the PPO implementation of OpenAI baselines (ppo2); the paper (arXiv 1707.06347, eq. 9) has
    the plain square.

    values, old_values, returns [T] float: of the critic, of the critic before the update, and its targets. Gradient
        flows to `values`. All is computed in fp32, or in the widest dtype given.
    loss_mask [T] bool: False leaves a token out. cu_seqlens [N+1] integer: bounds of the sequences.
    denominators: counts over the whole global batch; None counts this call's own.

    A token with a value that is not finite is dropped from the numerator, gets gradient 0 and is counted in the metric
    `value_nonfinite_tokens`. Raises ValueError on a config that breaks a rule or shapes that do not fit.
    """
    call = _prepare(config, values, old_values, returns, loss_mask, cu_seqlens, denominators)
    per_token = 0.5 * torch.maximum(call.error.square(), call.clipped_error.square())
    per_token = torch.where(call.live, per_token, 0)
    loss = (call.weights * per_token).sum()
    metrics = {
        "value_loss": Metric(loss.detach(), call.live.sum(), "sum"),
        "value_clipfrac": masked_mean(call.flat.to(loss.dtype), call.live),
        "value_nonfinite_tokens": Metric((call.loss_mask & ~call.live).sum(), call.loss_mask.sum(), "sum"),
    }
    return ValueLossOutput(loss, per_token, metrics)


@torch.no_grad()
def value_loss_derivative(
    config: ValueLossConfig | Mapping[str, Any],
    *,
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    loss_mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    denominators: Denominators | None = None,
) -> torch.Tensor:
    """d loss / d values [T] of `value_loss` in closed form: V - R, and 0 where the clipped error is the larger one."""
    call = _prepare(config, values, old_values, returns, loss_mask, cu_seqlens, denominators)
    return torch.where(call.live & ~call.flat, call.weights * call.error, 0)


@torch.no_grad()
def value_statistics(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> dict[str, float | None]:
    """Metrics of a batch's values [T] and returns [T] over the tokens of `mask` [T] bool that have both.

    `explained_variance`: 1 - var(returns - values) / var(returns): 1 is perfect, 0 is as good as a constant. None where
    it is not defined: equal returns, or no tokens, where the means are None, too.
    """
    mask = mask & values.isfinite() & returns.isfinite()
    values, returns = values[mask].double(), returns[mask].double()
    if not values.numel():
        return {"values/mean": None, "returns/mean": None, "explained_variance": None}
    # Shifted by one of them, equal returns have variance 0 exactly.
    spread = (returns - returns[0]).var(correction=0)
    unexplained = (returns - values).var(correction=0)
    return {
        "values/mean": values.mean().item(),
        "returns/mean": returns.mean().item(),
        "explained_variance": (1 - unexplained / spread).item() if spread > 0 else None,
    }


@dataclass(frozen=True)
class _Call:
    """Checked inputs of one call. live [T] bool: unmasked tokens all of whose values are finite.

    error, clipped_error [T]: V - R with V as it is, and clipped. flat [T] bool: the loss does not depend on V.
    """

    loss_mask: torch.Tensor
    live: torch.Tensor
    error: torch.Tensor
    clipped_error: torch.Tensor
    flat: torch.Tensor
    weights: torch.Tensor


def _prepare(config, values, old_values, returns, loss_mask, cu_seqlens, denominators) -> _Call:
    config = as_config(ValueLossConfig, config)
    if problems := value_loss_config_problems(config):
        raise ValueError(f"value loss: {'; '.join(problems)}")
    inputs = {"values": values, "old_values": old_values, "returns": returns}
    for name, tensor in {**inputs, "loss_mask": loss_mask}.items():
        if tensor.dim() != 1 or tensor.shape != values.shape:
            raise ValueError(
                f"value loss: {name}: found shape {tuple(tensor.shape)}, "
                f"expected [T] like values, {tuple(values.shape)}"
            )
    mask = loss_mask.bool()
    packing = Packing.from_cu_seqlens(cu_seqlens, mask.numel())
    finite, live = finite_values(inputs, mask, differentiable=("values",))
    values, old_values, returns = finite.values()
    error = clipped_error = values - returns
    if config.value_clip is not None:
        clipped_error = values.clamp(old_values - config.value_clip, old_values + config.value_clip) - returns
    weights = torch.where(live, token_weights(config, mask, packing, denominators, values.dtype), 0)
    flat = (clipped_error.square() > error.square()).detach()
    return _Call(mask, live, error, clipped_error, flat, weights)
