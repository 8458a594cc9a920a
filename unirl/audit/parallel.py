"""Largest differences between two outcomes of the same case."""

from dataclasses import dataclass

import torch

from unirl.audit.parallel_run import Outcome


@dataclass(frozen=True)
class Differences:
    """Largest absolute differences; a gradient's relative to the largest entry of that gradient, a norm's to the norm.

    token_values: log-probs and entropies in nats, or values. metrics: of all steps, by the worst name.
    """

    token_values: float
    loss: float
    grad_norm: float
    gradients: float
    weights: float
    worst_gradient: str
    metrics: dict[str, float]


def compare(found: Outcome, expected: Outcome) -> Differences:
    """Raises ValueError where one has what the other lacks."""
    for name in ("token_values", "gradients", "weights"):
        _same_keys(name, getattr(found, name), getattr(expected, name))
    gradients = {
        name: _difference(found.gradients[name], gradient) / max(float(gradient.abs().max()), 1e-30)
        for name, gradient in expected.gradients.items()
    }
    worst = max(gradients, key=gradients.__getitem__)
    metrics: dict[str, float] = {}
    for step, (ours, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        _same_keys(f"metrics of step {step}", ours, theirs)
        for name, value in theirs.items():
            metrics[name] = max(metrics.get(name, 0.0), abs(ours[name] - value))
    norm = min(step["grad_norm"] for step in expected.metrics)
    return Differences(
        token_values=max(_difference(found.token_values[name], value) for name, value in expected.token_values.items()),
        loss=max(value for name, value in metrics.items() if name in ("loss", "value_loss")),
        grad_norm=metrics["grad_norm"] / norm,
        gradients=gradients[worst],
        weights=max(_difference(found.weights[name], weight) for name, weight in expected.weights.items()),
        worst_gradient=worst,
        metrics=metrics,
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN in the same places is no difference; NaN in one alone is an infinite one."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    return float((found - expected).nan_to_num(0.0).abs().max())


def _same_keys(what: str, found: dict, expected: dict) -> None:
    if found.keys() != expected.keys():
        raise ValueError(f"{what}: found {sorted(found)}, expected {sorted(expected)}")
