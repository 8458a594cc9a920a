"""Sums and means over the sequences of a packed tensor."""

from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Packing:
    """N sequences packed in tensors of length T.

    index [T] int64: the sequence (0..N-1) of each token. num_sequences: N, empty sequences included.
    """

    index: torch.Tensor
    num_sequences: int

    @staticmethod
    def from_cu_seqlens(cu_seqlens: torch.Tensor, num_tokens: int) -> "Packing":
        """cu_seqlens [N+1] integer, 0 first, T last, not decreasing; raises ValueError where it is not so."""
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0 or cu_seqlens.is_floating_point():
            raise ValueError(f"cu_seqlens: found {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}, expected integer [N+1]")
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != num_tokens or any(b < a for a, b in pairwise(bounds)):
            raise ValueError(
                f"cu_seqlens: found {bounds[0]} to {bounds[-1]}, expected bounds rising from 0 to {num_tokens} tokens"
            )
        lengths = cu_seqlens.long().diff()
        sequences = torch.arange(lengths.numel(), device=cu_seqlens.device)
        return Packing(torch.repeat_interleave(sequences, lengths, output_size=num_tokens), lengths.numel())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """values [T] -> [N]."""
        return values.new_zeros(self.num_sequences).index_add(0, self.index, values)

    def count(self, mask: torch.Tensor) -> torch.Tensor:
        """mask [T] bool -> [N] int64: True tokens of each sequence."""
        return self.sum(mask.long())

    def mean(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """values [T], mask [T] bool -> [N]: mean over each sequence's True tokens, 0 where there is none."""
        return self.sum(torch.where(mask, values, 0)) / self.count(mask).clamp(min=1)

    def max(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """values [T], mask [T] bool -> [N]: largest of each sequence's True tokens, -inf where there is none."""
        lowest = values.new_full((self.num_sequences,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, torch.where(mask, values, -torch.inf), "amax")

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """values [N] -> [T]: each sequence's value at its tokens."""
        return values[self.index]
