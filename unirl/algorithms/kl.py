"""Estimators of the KL to a reference policy from the log-probs of the tokens drawn."""

import torch

from unirl.algorithms.ratio import MAX_LOG_RATIO


def kl_estimate(estimator: str, logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """logp, ref_logp [T] -> [T], estimates of KL(policy, reference); the log ratio is clamped to [-20, 20].

    With x = logp - ref_logp: k1 x; k2 x^2 / 2; k3 exp(-x) - 1 + x (J. Schulman, Approximating KL divergence, 2020).
    """
    x = (logp - ref_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x
    raise ValueError(f"kl_estimator: found {estimator!r}, expected k1, k2 or k3")


def kl_derivative(estimator: str, logp: torch.Tensor, ref_logp: torch.Tensor) -> torch.Tensor:
    """[T]: d estimate / d logp; 0 where the clamp is active."""
    x = logp - ref_logp
    slope = {"k1": torch.ones_like, "k2": lambda x: x, "k3": lambda x: -torch.expm1(-x)}[estimator](x)
    return torch.where(x.abs() <= MAX_LOG_RATIO, slope, 0)
