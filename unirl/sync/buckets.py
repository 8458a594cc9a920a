"""Weights on their way, laid one behind the other into flat buffers that are used in turn."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

NUM_BUFFERS = 2
"""One is filled while the other is on its way."""

_LARGEST_KEPT = 2
"""In buckets: a buffer that a single tensor made larger than that is not kept."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a bucket: the bytes `start` to `end` of it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype_name(self) -> str:
        """As servers write it: `float32`."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Bucket:
    """flat: [num_bytes] uint8, part of a buffer. All its tensors are of one dtype, so that each is aligned."""

    flat: torch.Tensor
    entries: tuple[Entry, ...]
    is_last: bool


class Buffers:
    """NUM_BUFFERS buffers that are filled in turn. They may stay from one sync to the next: new memory costs several
    times what filling it does.

    allocate: makes one, [so many] uint8. release: takes leave of one.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        release: Callable[[torch.Tensor], None] = lambda buffer: None,
    ):
        self._allocate = allocate
        self._release = release
        self._held: list[torch.Tensor | None] = [None] * NUM_BUFFERS
        self._turn = 0

    def next(self, num_bytes: int, usual_bytes: int) -> torch.Tensor:
        """The one whose turn it is, [num_bytes or more] uint8; `usual_bytes` where it is made anew for less."""
        found = self._held[self._turn]
        if found is None or len(found) < num_bytes:
            self._drop(self._turn)
            self._held[self._turn] = found = self._allocate(max(num_bytes, usual_bytes))
        self._turn = (self._turn + 1) % NUM_BUFFERS
        return found

    def rest(self, bucket_bytes: int) -> None:
        """At the end of a sync with buckets of that size: nobody reads them any more."""
        for place, buffer in enumerate(self._held):
            if buffer is not None and len(buffer) > _LARGEST_KEPT * bucket_bytes:
                self._drop(place)

    def clear(self) -> None:
        """Release all."""
        for place in range(NUM_BUFFERS):
            self._drop(place)

    def _drop(self, place: int) -> None:
        buffer, self._held[place] = self._held[place], None
        if buffer is not None:
            self._release(buffer)


class Packer:
    """Packs `weights` into buckets of about `bucket_bytes`; a larger tensor makes a bucket of its own.

    A bucket lies in one of `buffers`, so that it is overwritten by the one that comes NUM_BUFFERS later.
    """

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int, buffers: Buffers):
        self._weights = weights
        self._bucket_bytes = bucket_bytes
        self._buffers = buffers
        self._next = next(weights, None)

    @property
    def has_more(self) -> bool:
        return self._next is not None

    def pack(self) -> Bucket:
        """The next bucket; there must be more."""
        dtype = self._next[1].dtype
        buffer = self._buffers.next(self._next[1].nbytes, self._bucket_bytes)
        limit = min(len(buffer), max(self._bucket_bytes, self._next[1].nbytes))  # it may be of syncs with other buckets
        entries, position = [], 0
        while self._next is not None:
            name, tensor = self._next
            end = position + tensor.nbytes
            if end > limit or tensor.dtype != dtype:
                break
            buffer[position:end].view(dtype).view(tensor.shape).copy_(tensor)
            entries.append(Entry(name, dtype, tuple(tensor.shape), position, end))
            position = end
            self._next = next(self._weights, None)
        return Bucket(buffer[:position], tuple(entries), is_last=self._next is None)
