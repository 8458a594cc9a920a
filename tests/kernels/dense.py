"""The oracle: log_softmax, gather and torch's own autograd over the whole vocabulary, in float64."""

import os
from typing import NamedTuple

import torch
from torch import Tensor

# Triton's interpreter truncates where every device rounds to the nearest.
BFLOAT16_ERROR = 2.0**-7 if os.environ.get("TRITON_INTERPRET") == "1" else 2.0**-8


class Dense(NamedTuple):
    logp: Tensor
    entropy: Tensor
    gradient: Tensor


def dense(logits: Tensor, targets: Tensor, vocab: int, temperature: float, grads: Tensor) -> Dense:
    """Values [T], and the gradient [T, V] of grads[0] * logp + grads[1] * entropy, padding included (0)."""
    x = logits.detach().double().requires_grad_()
    logp_all = torch.log_softmax(x[:, :vocab] / temperature, 1)
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    entropy = -(logp_all.exp() * logp_all.clamp(min=-1e30)).sum(1)
    (grads[0].double() @ logp + grads[1].double() @ entropy).backward()
    return Dense(logp.detach(), entropy.detach(), x.grad)


def assert_values(found: Tensor, expected: Tensor) -> None:
    """Within 1e-6, and two roundings of float32 where the value itself is large."""
    tolerance = 1e-6 + 1.2e-7 * expected.abs()
    error = (found.double() - expected).abs()
    assert (error <= tolerance).all(), f"off by {error.max():.2e}, allowed {tolerance[error.argmax()]:.2e}"


def assert_gradient(found: Tensor, expected: Tensor) -> None:
    """float32: 1e-6 of the row's largest entry; bfloat16: also one rounding of the entry itself."""
    scale = expected.abs().amax(1, keepdim=True) + 1.0 if expected.numel() else expected
    rounding = BFLOAT16_ERROR * expected.abs() if found.dtype == torch.bfloat16 else 0.0
    error = (found.double() - expected).abs()
    assert (error <= 1e-6 * scale + rounding).all(), f"off by {error.max():.2e}"
