"""Context parallelism: which tokens of a micro-batch a rank has, and how its tokens attend to those of all ranks.

Every tree is cut into 2 * cp equal chunks, and rank r takes the chunks r and 2 * cp - 1 - r: an early one, which sees
little, and a late one, which sees much, so that all ranks have the same work. Keys and values are gathered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from unirl.train.packing import MicroBatch

MAX_CALL_KEYS = 65_536
"""Keys of a batched call, unless it holds one chunk alone."""
MAX_MASK_ENTRIES = 2**24
"""Entries of a batched call's mask (trees with branches), unless it holds one chunk alone."""


@dataclass(frozen=True)
class ContextCall:
    """`batch` (B) chunks of `queries` tokens each that attend to `keys` tokens each, which end with the chunk itself.

    mask [B, 1, queries, keys] bool: who attends to whom; None is plain causal.
    """

    batch: int
    queries: int
    keys: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class ContextPlan:
    """The calls of a micro-batch on this rank, which has T / cp of its T tokens.

    query_index [T / cp] int64: tokens of this rank, call after call. query_order [T / cp] int64: its inverse.
    key_index [K] int64: positions among the gathered tokens (those of rank 0, of rank 1, ...), call after call.
    """

    calls: list[ContextCall]
    query_index: torch.Tensor
    query_order: torch.Tensor
    key_index: torch.Tensor


@dataclass(frozen=True)
class ContextSplit:
    """Tokens (T) and response tokens (R) of a micro-batch, dealt to the `size` context-parallel ranks."""

    batch: MicroBatch
    size: int
    rank: int

    @cached_property
    def owners(self) -> torch.Tensor:
        """[T] int64: the rank of each token."""
        lengths = self.batch.tree_cu_seqlens.diff()
        pieces = 2 * self.size
        if (lengths % pieces).any():
            raise ValueError(
                f"trees of {lengths.tolist()} tokens cannot be cut into 2 * cp = {pieces} equal chunks: pad them to "
                f"multiples of {pieces}"
            )
        starts = self.batch.tree_cu_seqlens[:-1].repeat_interleave(lengths)
        offsets = torch.arange(self.batch.tokens.numel(), device=starts.device) - starts
        chunk = offsets // (lengths // pieces).repeat_interleave(lengths)
        return torch.minimum(chunk, pieces - 1 - chunk)

    @cached_property
    def slots(self) -> torch.Tensor:
        """[T] int64: position of each token among the gathered ones."""
        order = self.owners.argsort(stable=True)
        slots = torch.empty_like(order)
        slots[order] = torch.arange(order.numel(), device=order.device)
        return slots

    @cached_property
    def tokens(self) -> torch.Tensor:
        """[T / cp] int64: the tokens of this rank, ascending."""
        return torch.nonzero(self.owners == self.rank).flatten()

    @cached_property
    def rows(self) -> torch.Tensor:
        """[R of this rank] int64: response tokens that a hidden state of this rank predicts, ascending."""
        return torch.nonzero(self.owners[self.batch.predict_positions] == self.rank).flatten()

    @property
    def predict_positions(self) -> torch.Tensor:
        """[R of this rank] int64: the hidden states of this rank that predict them."""
        return self._local(self.slots[self.batch.predict_positions[self.rows]])

    def plan(self) -> ContextPlan:
        """Chunks of one length at one place in their trees go into one call, within the bounds of a call."""
        calls, queries, keys = [], [], []
        for trees, chunk, length, masked in self._groups():
            starts = self.batch.tree_cu_seqlens[trees][:, None]
            offsets = torch.arange((chunk + 1) * length, device=starts.device)
            seen = starts + offsets
            own = seen[:, chunk * length :]
            mask = self._mask(own, seen) if masked else None
            calls.append(ContextCall(len(trees), length, offsets.numel(), mask))
            queries.append(self._local(self.slots[own.flatten()]))
            keys.append(self.slots[seen.flatten()])
        query_index = torch.cat(queries)
        return ContextPlan(calls, query_index, query_index.argsort(), torch.cat(keys))

    def _local(self, slots: torch.Tensor) -> torch.Tensor:
        return slots - self.rank * (self.slots.numel() // self.size)

    def _groups(self) -> Iterator[tuple[list[int], int, int, bool]]:
        """(trees, chunk, tokens of the chunk, whether the trees have branches) of each call."""
        bounds = self.batch.tree_cu_seqlens
        branched = torch.cat([bounds.new_zeros(1), (self.batch.branch_ids != 0).long().cumsum(0)])[bounds].diff() > 0
        trees_like: dict[tuple[int, bool], list[int]] = {}
        for tree, kind in enumerate(zip(bounds.diff().tolist(), branched.tolist(), strict=True)):
            trees_like.setdefault(kind, []).append(tree)
        for (length, masked), trees in trees_like.items():
            size = length // (2 * self.size)
            for chunk in (self.rank, 2 * self.size - 1 - self.rank):
                keys = (chunk + 1) * size
                most = max(1, MAX_CALL_KEYS // keys)
                if masked:
                    most = max(1, min(most, MAX_MASK_ENTRIES // (size * keys)))
                for first in range(0, len(trees), most):
                    yield trees[first : first + most], chunk, size, masked

    def _mask(self, own: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """[B, 1, queries, keys]: the earlier tokens, or the token itself, of the trunk or its branch."""
        query, key = self.batch.branch_ids[own][:, :, None], self.batch.branch_ids[seen][:, None]
        visible = (seen[:, None] <= own[:, :, None]) & ((key == 0) | (key == query))
        return visible[:, None]


class _GatherTokens(torch.autograd.Function):
    """[T / cp, ...] of each rank -> [T, ...]; in the backward pass each rank gets the sum over ranks for its own."""

    @staticmethod
    def forward(ctx, own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = own.new_empty((own.shape[0] * group.size(), *own.shape[1:]))
        dist.all_gather_into_tensor(gathered, own.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad.contiguous(), group=ctx.group)
        return own, None


class _GatherRows(torch.autograd.Function):
    """[R of this rank] -> [R]. Every rank goes on with the same values and the same loss; in the backward pass each
    takes the gradient of its own rows, so that the loss is not counted once for each rank.
    """

    @staticmethod
    def forward(ctx, own: torch.Tensor, rows: torch.Tensor, total: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(rows)
        gathered = own.new_zeros(total)
        gathered[rows] = own
        dist.all_reduce(gathered, group=group)  # one rank has the row, the others add 0: exact
        return gathered

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (rows,) = ctx.saved_tensors
        return grad[rows], None, None, None


def gather_tokens(own: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[T / cp, ...] of each rank -> [T, ...], rank after rank; differentiable."""
    return _GatherTokens.apply(own, group)


def gather_rows(own: torch.Tensor, split: ContextSplit, group: dist.ProcessGroup) -> torch.Tensor:
    """A value of each response token, from the ranks that have them: [R of this rank] -> [R]; differentiable."""
    return _GatherRows.apply(own, split.rows, split.batch.targets.numel(), group)
