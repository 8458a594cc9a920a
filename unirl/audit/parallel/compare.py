"""Largest differences between two outcomes of the same case, and how large they may be."""

import math
from dataclasses import dataclass

import torch

from unirl.audit.parallel.train import Outcome


@dataclass(frozen=True)
class Difference:
    """Largest difference of one quantity, of what it is (`where`), and what is allowed."""

    found: float
    tolerance: float
    where: str

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.found <= self.tolerance


@dataclass(frozen=True)
class Tolerances:
    """Largest differences allowed.

    token_values: log-probs, entropies (nats) and values. loss, metrics: relative to the metric where that is beyond 1.
    grad_norm: relative. gradients: relative to the largest entry of the same weight's gradient. weights: absolute, for
    each step.
    """

    token_values: float
    loss: float
    metrics: float
    grad_norm: float
    gradients: float
    weights: float


TOLERANCES = {
    "float32": Tolerances(token_values=1e-5, loss=1e-5, metrics=1e-5, grad_norm=1e-5, gradients=1e-5, weights=1e-6),
    # 8 bits a number: what differs is rounded in another place in every layer, and a weight is stored with 8 bits
    "bfloat16": Tolerances(5e-2, loss=1e-3, metrics=2e-2, grad_norm=3e-2, gradients=0.15, weights=2e-3),
}
"""By dtype of the model."""

QUANTITIES = ("log-probs", "loss", "metrics", "grad norm", "gradients", "weights", "ranks agree")
"""What is compared. log-probs: with entropies, and values of a critic. metrics: all but loss and gradient norm."""

_LOSSES = ("loss", "actor_loss", "value_loss")
_NORMS = ("grad_norm", "critic/grad_norm")


def compare(found: Outcome, expected: Outcome, tolerances: Tolerances) -> dict[str, Difference]:
    """By quantity, see `QUANTITIES`. Raises ValueError where one outcome has what the other lacks."""
    steps = sum(int(step["optimizer_steps"]) for step in expected.metrics)
    by_metric = _metrics(found, expected)
    kinds = {name: "loss" if name in _LOSSES else "grad norm" if name in _NORMS else "metrics" for name in by_metric}

    def of_metrics(kind: str, tolerance: float) -> Difference:
        return _worst({name: by_metric[name] for name, its in kinds.items() if its == kind}, tolerance)

    return {
        "log-probs": _tensors("token_values", found, expected, tolerances.token_values),
        "loss": of_metrics("loss", tolerances.loss),
        "metrics": of_metrics("metrics", tolerances.metrics),
        "grad norm": of_metrics("grad norm", tolerances.grad_norm),
        "gradients": _tensors("gradients", found, expected, tolerances.gradients, relative=True),
        "weights": _tensors("weights", found, expected, tolerances.weights * max(steps, 1)),
        "ranks agree": Difference(0.0 if found.ranks_agree else math.inf, 0.0, "metrics, or weights of replicas"),
    }


def _metrics(found: Outcome, expected: Outcome) -> dict[str, float]:
    """By name, of the part where it is largest."""
    largest: dict[str, float] = {}
    for index, (ours, theirs) in enumerate(zip(found.metrics, expected.metrics, strict=True)):
        _check_names(f"metrics of part {index}", ours, theirs)
        for name, value in theirs.items():
            scale = abs(value) if name in _NORMS else max(abs(value), 1.0)
            largest[name] = max(largest.get(name, 0.0), _number(ours[name] - value) / max(scale, 1e-30))
    return largest


def _number(difference: float) -> float:
    """Its size; infinite where it is none, so that no comparison loses it."""
    return math.inf if math.isnan(difference) else abs(difference)


def _tensors(field: str, found: Outcome, expected: Outcome, tolerance: float, relative: bool = False) -> Difference:
    ours, theirs = getattr(found, field), getattr(expected, field)
    _check_names(field, ours, theirs)
    largest = {}
    for name, tensor in theirs.items():
        scale = max(float(tensor.abs().max()), 1e-30) if relative else 1.0
        largest[name] = _largest(ours[name], tensor) / scale
    return _worst(largest, tolerance)


def _largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN in the same places is no difference; NaN in one alone is an infinite one."""
    if found.shape != expected.shape or not torch.equal(found.isnan(), expected.isnan()):
        return math.inf
    return _number(float((found - expected).nan_to_num(0.0).abs().max()))


def _worst(largest: dict[str, float], tolerance: float) -> Difference:
    where = max(largest, key=largest.__getitem__)
    return Difference(largest[where], tolerance, where)


def _check_names(what: str, found: dict, expected: dict) -> None:
    if found.keys() != expected.keys():
        raise ValueError(f"{what}: found {sorted(found)}, expected {sorted(expected)}")
