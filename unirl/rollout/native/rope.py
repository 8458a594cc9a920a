"""Rotary position embedding (RoFormer, arXiv:2104.09864) with the frequency scaling of Llama 3."""

import math
from collections.abc import Mapping

import torch

from unirl.rollout.native.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """[head_dim / 2] float32 on the CPU: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    return frequencies if config.rope_scaling is None else _scale_llama3(frequencies, config.rope_scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: Mapping[str, float]) -> torch.Tensor:
    """Divide low frequencies by `factor`, keep high ones, blend linearly in turns per original context between."""
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling["factor"]


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [...] int64 -> (cos, sin), each [..., 1, head_dim] float32; the first half of sin is negated."""
    angles = positions[..., None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads [..., H, head_dim]: dimension i of the first half turns with dimension i of the second half."""
    # A roll by half a head swaps the halves; the sign that the swap needs is already in `sin`.
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)
