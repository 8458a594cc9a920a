"""Weights on their way, laid one behind the other into flat buffers that are used in turn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

NUM_BUFFERS = 2
"""One is filled while the other is on its way."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a bucket: the bytes `start` to `end` of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """flat: [num_bytes] uint8, part of a buffer. All its tensors are of one dtype, so that each is aligned."""

    flat: torch.Tensor
    entries: tuple[Entry, ...]
    is_last: bool


class Packer:
    """Packs `weights` into buckets of about `bucket_bytes`; a larger tensor makes a bucket of its own.

    allocate: gives a buffer, [so many] uint8. At most `NUM_BUFFERS` are held: a bucket is overwritten by the one that
    comes NUM_BUFFERS later.
    """

    def __init__(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        bucket_bytes: int,
        allocate: Callable[[int], torch.Tensor],
    ):
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._allocate = allocate
        self._buffers: list[torch.Tensor | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._next = next(weights, None)

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def pack(self) -> Bucket:
        """The next bucket; there must be more."""
        dtype = self._next[1].dtype
        buffer = self._buffer(self._next[1].nbytes)
        entries, position = [], 0
        while self._next is not None:
            name, tensor = self._next
            end = position + tensor.nbytes
            if end > len(buffer) or tensor.dtype != dtype:
                break
            buffer[position:end].view(dtype).view(tensor.shape).copy_(tensor)
            entries.append(Entry(name, dtype, tuple(tensor.shape), position, end))
            position = end
            self._next = next(self._weights, None)
        return Bucket(buffer[:position], tuple(entries), is_last=self._next is None)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """The one whose turn it is, large enough for that many bytes."""
        found = self._buffers[self._turn]
        if found is None or len(found) < num_bytes:
            self._buffers[self._turn] = found = self._allocate(max(num_bytes, self._bucket_bytes))
        self._turn = (self._turn + 1) % NUM_BUFFERS
        return found
