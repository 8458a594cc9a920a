"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), "rotate half" layout, as the Llama family has it."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretch of low frequencies; lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    head_dim: int
    theta: float
    scaling: Llama3Scaling | None = None

    def inverse_frequencies(self) -> torch.Tensor:
        """[head_dim / 2] float32, in radians per token."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        frequencies = 1.0 / self.theta**exponents
        return frequencies if self.scaling is None else _stretch(frequencies, self.scaling)

    def cos_sin(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """position_ids [T] int64 -> cos and sin, [T, 1, head_dim / 2] float32 each."""
        angles = position_ids[:, None, None].float() * self.inverse_frequencies().to(position_ids.device)
        return angles.cos(), angles.sin()


def _stretch(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Divide low frequencies by the factor, keep high ones, blend linearly between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


class _Rotate(torch.autograd.Function):
    """Rotate the pairs (x[i], x[i + D/2]) by the given angles; the gradient is rotated back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x.dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D], cos and sin [T, 1, D / 2] float32 -> x rotated, in its dtype; computed in float32."""
    return _Rotate.apply(x, cos, sin)
