"""The part of a sync that runs where the weights are: buckets to servers, and what becomes of each server."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import torch

from unirl.rollout.sglang import ChecksumCollector, ServerControl, SGLangClient

Weights = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Destination:
    """A server as a sender sees it.

    streams: see `ServerInfo`. gpus: UUIDs of the devices of its processes, where they are known.
    """

    url: str
    api_key: str | None = field(repr=False)
    tp: int
    device: str
    streams: bool = False
    gpus: tuple[str, ...] = ()


@dataclass
class Sent:
    """What a sender has done. failures: by URL; broken: the other servers did not get everything either."""

    failures: dict[str, Exception] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    sums: ChecksumCollector | None = None
    broken: bool = False


@dataclass(frozen=True)
class Sender(ABC):
    """Sends the weights that it is called with to `servers`; it is pickled on its way to where they are.

    shapes: by name, of the model that the servers have. timeout_s: limit for a server to take a bucket.
    version: what the last bucket is marked with, after which the prefix cache is flushed if `flush`; None where other
    weights follow. sums: an empty collector, where checksums are due.
    """

    servers: tuple[Destination, ...]
    shapes: Mapping[str, tuple[int, ...]]
    bucket_bytes: int
    timeout_s: float
    version: int | None
    flush: bool
    sums: ChecksumCollector | None

    def __call__(self, weights: Weights) -> Sent:
        """Raises ValueError, before the bucket is sent, where a weight is not the model's."""
        sent = Sent(sums=self.sums)
        weights = self._checked(weights, sent)
        return asyncio.run(self._run(self.sums.watch(weights) if self.sums else weights, sent))

    def _checked(self, weights: Weights, sent: Sent) -> Weights:
        for name, tensor in weights:
            found, expected = tuple(tensor.shape), self.shapes.get(name)
            if found != expected:
                raise ValueError(f"weights: {name} has shape {found}, in the model of the servers {expected}")
            sent.names.append(name)
            yield name, tensor

    async def _run(self, weights: Weights, sent: Sent) -> Sent:
        async with AsyncExitStack() as stack:
            controls = {}
            for server in self.servers:
                client = SGLangClient(server.url, server.api_key)
                stack.push_async_callback(client.close)
                controls[server.url] = ServerControl(client)
            await self._send(weights, controls, sent)
        return sent

    @abstractmethod
    async def _send(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        """Send all of them, and note who fails."""

    def _marks(self, is_last: bool) -> dict:
        """What every request says of what it brings; `is_last` of what this sender sends."""
        if is_last and self.version is not None:
            return {"flush_cache": self.flush, "weight_version": str(self.version)}
        return {"flush_cache": False}
