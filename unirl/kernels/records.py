"""What one pass over a row of logits leaves behind, and how the records of vocabulary shards become one answer.

A back-end reduces each row x of its shard, with m = max(x) over the real columns and z = (x - m) / temperature, to

    MAX     m                     in units of the logits; -inf where no real column is finite
    SUM     sum_j exp(z_j)        0 for such a row
    TARGET  z of the target       -inf where another shard holds the target
    SHIFT   sum_j exp(z_j) z_j    only where the entropy is asked for

Everything but MAX is relative to the row's own maximum, so nothing large is ever rounded: a log-sum-exp of 50 in
float32 would already be off by 2e-6.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

MAX, SUM, TARGET, SHIFT = range(4)

# Columns of a target that are none: another shard holds it, or the row is masked and stays unread (an empty record).
ELSEWHERE, UNREAD = -1, -2


def record_width(with_entropy: bool) -> int:
    """Words per row: float32 on the wire, hence 12 bytes per token and rank, 16 with the entropy."""
    return 4 if with_entropy else 3


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that this rank's logits cover.

    `width` columns of storage start at vocabulary id `offset`; the first `columns` of them are real, the rest padding.
    `vocab` is the size of the real vocabulary over all shards.
    """

    offset: int
    width: int
    columns: int
    vocab: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, width: int, vocab: int | None, group: dist.ProcessGroup | None) -> "VocabShard":
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        total = width * size
        if vocab is None:
            vocab = total
        if not 0 < vocab <= total:
            raise ValueError(
                f"vocab={vocab} does not fit logits of {width} columns on {size} rank(s): expected 1 to {total}, "
                "the size of the real (unpadded) vocabulary"
            )
        offset = rank * width
        return cls(offset, width, min(max(vocab - offset, 0), width), vocab, group)

    def local(self, targets: Tensor) -> Tensor:
        """Vocabulary ids [T] as columns of this shard; ELSEWHERE where another shard holds the target."""
        column = targets - self.offset
        return torch.where((column >= 0) & (column < self.columns), column, ELSEWHERE)

    @property
    def whole(self) -> bool:
        """Whether there is no other shard."""
        return self.group is None or dist.get_world_size(self.group) == 1

    def gather(self, record: Tensor, wire: torch.dtype) -> Tensor:
        """Record [words, T] of every shard, [shards, words, T] in float64: the only collective of the forward pass."""
        if self.whole:
            return record.double()[None]
        size = dist.get_world_size(self.group)
        packed = record.to(wire).contiguous()
        gathered = packed.new_empty((size, *packed.shape))
        dist.all_gather(list(gathered), packed, group=self.group)
        return gathered.double()


@dataclass(frozen=True)
class RowSoftmax:
    """What rebuilds the distribution of each row, all [T] float64: p_j = exp((x_j - peak) / temperature) / total.

    `total` is 0 where no column of the row is finite; `entropy` (nats) is None where nobody asked for it.
    """

    peak: Tensor
    total: Tensor
    entropy: Tensor | None


def finite_base(row_max: Tensor) -> Tensor:
    """What to subtract from a row: its maximum, or 0 where that is -inf (-inf - -inf would be NaN)."""
    return torch.where(row_max == -torch.inf, 0.0, row_max)


def combine(records: Tensor, targets: Tensor, shard_width: int, temperature: float) -> tuple[Tensor, RowSoftmax]:
    """Log-probs [T] float64 and distributions over the whole vocabulary, from its shards' records [shards, words, T].

    With M = max_r m_r and a_r = (m_r - M) / temperature: total = sum_r e^{a_r} SUM_r, and
    H = log(total) - sum_r e^{a_r} (SHIFT_r + a_r SUM_r) / total. A row without a finite logit has log-prob -inf and
    entropy 0; a NaN stays in its row.
    """
    row_max, row_sum = records[:, MAX], records[:, SUM]
    peak = finite_base(row_max.amax(0))
    rise = (finite_base(row_max) - peak) / temperature
    weight = torch.where(row_sum == 0, 0.0, rise.exp())
    total = (weight * row_sum).sum(0)
    empty = total == 0
    log_total = torch.where(empty, 1.0, total).log()

    owner = torch.div(targets, shard_width, rounding_mode="floor")[None]
    target = records[:, TARGET].gather(0, owner) + rise.gather(0, owner)
    logp = torch.where(empty, -torch.inf, target[0] - log_total)

    entropy = None
    if records.shape[1] > SHIFT:
        shift = torch.where(weight == 0, 0.0, weight * (records[:, SHIFT] + rise * row_sum)).sum(0)
        entropy = torch.where(empty, 0.0, log_total - shift / torch.where(empty, 1.0, total))
    return logp, RowSoftmax(peak, total, entropy)
