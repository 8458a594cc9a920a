"""Denominators, and the weight with which a token's loss enters the loss of the batch."""

from dataclasses import dataclass

import torch

from unirl.algorithms.config import PolicyLossConfig, ValueLossConfig
from unirl.algorithms.packed import Packing


@dataclass(frozen=True)
class Denominators:
    """What the losses of a batch are divided by, once: counted over all its micro-batches and all ranks.

    tokens: unmasked tokens. sequences: sequences with at least one unmasked token.
    """

    tokens: float
    sequences: float

    def __add__(self, other: "Denominators") -> "Denominators":
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


def count_denominators(loss_mask: torch.Tensor, cu_seqlens: torch.Tensor) -> Denominators:
    """loss_mask [T] bool, cu_seqlens [N+1] -> the denominators of these sequences."""
    mask = loss_mask.bool()
    return _count(mask, Packing.from_cu_seqlens(cu_seqlens, mask.numel()))


def _count(mask: torch.Tensor, packing: Packing) -> Denominators:
    return Denominators(int(mask.sum()), int((packing.count(mask) > 0).sum()))


def token_weights(
    config: PolicyLossConfig | ValueLossConfig,
    mask: torch.Tensor,
    packing: Packing,
    denominators: Denominators | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """mask [T] bool -> [T]: the loss of the batch is the sum of weight times token loss; 0 where masked.

    `mask` is the loss mask as it came in, so that tokens rejected later stay in the denominator. A sequence must
    not be split over calls where the mode takes its mean (seq-mean-token-mean).
    """
    totals = denominators if denominators is not None else _count(mask, packing)
    # A batch without any unmasked token has loss 0, not 0 / 0.
    tokens, sequences = max(float(totals.tokens), 1.0), max(float(totals.sequences), 1.0)
    weights = mask.to(dtype)
    match config.loss_agg_mode:
        case "token-mean":
            return weights / tokens
        case "seq-mean-token-sum":
            return weights / sequences
        case "seq-mean-token-mean":
            return weights / (packing.spread(packing.count(mask)).clamp(min=1) * sequences)
        case "seq-mean-token-sum-norm":
            return weights / (config.horizon * sequences)
    raise ValueError(f"loss_agg_mode: found {config.loss_agg_mode!r}")
