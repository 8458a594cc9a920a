"""The worker of one rank: hosts the models of a run and calls their methods."""

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from unirl.cluster.calls import ModelFacts, RankCall


class HostedModel(Protocol):
    """What every model of a worker has, beside the methods that are called."""

    vocab_size: int

    def close(self) -> None: ...


MakeModels = Callable[[], Mapping[str, HostedModel]]
"""Makes the models of one rank, by name; the process group, if there are several ranks, is there by then."""


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a process group find each other: the driver's TCPStore; how long a collective may take."""

    host: str
    port: int
    timeout_s: float


@dataclass(frozen=True)
class Bucket:
    """The next tensors of a stream: number `index` of its buckets, of about `max_bytes`."""

    model: str
    method: str
    index: int
    max_bytes: int


class Worker:
    """Hosts the models of one rank. `make_models` is importable by name and pickled."""

    def __init__(self, make_models: MakeModels):
        self._make_models = make_models
        self._models: dict[str, HostedModel] = {}
        self._stream: _Stream | None = None
        self._joined = False

    def start(self, rank: int = 0, world_size: int = 1, meeting: Meeting | None = None) -> dict[str, ModelFacts]:
        """Join the process group and make the models; what they are. A worker that runs already starts over."""
        self.stop()
        if meeting is not None:
            self._joined = True
            _join(rank, world_size, meeting)
        self._models = dict(self._make_models())
        return {name: ModelFacts.of(model) for name, model in self._models.items()}

    def call(self, call: RankCall, share: Any = None) -> Any:
        """The method's result where the call wants this rank's, else None. Raises what the method raises."""
        method = getattr(self._models[call.model], call.method)
        result = method(share, *call.args) if call.has_share else method(*call.args)
        return result if call.answers else None

    def iterate(self, model: str, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The iterator that the method gives."""
        return getattr(self._models[model], method)()

    def next_bucket(self, bucket: Bucket, answers: bool) -> tuple[list[tuple[str, torch.Tensor]], bool]:
        """The tensors of the bucket, none where the rank does not answer, and whether more come.

        A bucket that is not the one after the last begins the stream anew and skips the buckets before.
        """
        stream = self._stream
        if stream is None or not stream.continues_with(bucket):
            stream = self._stream = _Stream(bucket, self.iterate(bucket.model, bucket.method))
        while stream.next_index < bucket.index:
            stream.take()
        found = stream.take()
        has_more = stream.has_more
        if not has_more:
            self._stream = None
        return (found if answers else []), has_more

    def capture(self, model: str) -> dict[str, Any]:
        """A copy-free view of what a checkpoint of this rank's part of the model holds."""
        return self._models[model].capture()

    def restore(self, model: str, state: dict[str, Any]) -> None:
        """Go on from what `capture` gave."""
        self._models[model].restore(state)

    def stop(self) -> None:
        """Close the models and leave the process group."""
        self._stream = None
        for model in reversed(self._models.values()):
            model.close()
        self._models = {}
        if self._joined and dist.is_initialized():
            dist.destroy_process_group()
        self._joined = False
        gc.collect()  # graphs of a pass that failed hold the old models


class _Stream:
    """An iterator of (name, tensor), taken in buckets."""

    def __init__(self, bucket: Bucket, iterator: Iterator[tuple[str, torch.Tensor]]):
        self.kind = (bucket.model, bucket.method, bucket.max_bytes)
        self.next_index = 0
        self._iterator = iterator
        self._ahead = next(iterator, None)

    @property
    def has_more(self) -> bool:
        return self._ahead is not None

    def continues_with(self, bucket: Bucket) -> bool:
        return self.kind == (bucket.model, bucket.method, bucket.max_bytes) and self.next_index == bucket.index

    def take(self) -> list[tuple[str, torch.Tensor]]:
        found, size = [], 0
        while self._ahead is not None and (not found or size + self._ahead[1].nbytes <= self.kind[2]):
            found.append(self._ahead)
            size += self._ahead[1].nbytes
            self._ahead = next(self._iterator, None)
        self.next_index += 1
        return found


def _join(rank: int, world_size: int, meeting: Meeting) -> None:
    timeout = timedelta(seconds=meeting.timeout_s)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)  # the only one that the process sees
        backend = "cpu:gloo,cuda:nccl"
        # A lost peer is for the driver to find: the watchdog of NCCL would end this process with it.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    store = dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
