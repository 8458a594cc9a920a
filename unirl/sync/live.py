"""Weight sync straight from the processes that hold the model, by tensor or by broadcast: the driver's part."""

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unirl.rollout.sglang import (
    RequestRefusedError,
    Server,
    ServerLostError,
    Update,
    WeightSyncError,
)
from unirl.rollout.weights import check_weights
from unirl.sync.distributed import BroadcastSender
from unirl.sync.payload import device_uuid
from unirl.sync.sender import Destination, Sender, Sent
from unirl.sync.shared_memory import release_idle
from unirl.sync.tensor import TensorSender

Outcomes = dict[str, Exception]
"""Of servers that failed, by URL."""


class LiveTransfer(ABC):
    """Sends from where the weights are, one pipeline stage after the other, bucket by bucket; a `WeightTransfer`.

    Nothing of the model passes through this process, unless it holds the model. Names and shapes are checked before any
    server sees a weight, and each weight again on its way.

    bucket_bytes: size of a bucket; each sending process holds two. timeout_s: limit for a server to take one.
    """

    keeps_weights = False

    def __init__(self, *, bucket_bytes: int, timeout_s: float):
        self._bucket_bytes = bucket_bytes
        self._timeout_s = timeout_s
        self._update: Update | None = None

    def stage(self, update: Update) -> None:
        """See `WeightTransfer.stage`."""
        _check(update)
        self._update = update

    async def send(self, servers: Sequence[Server], *, flush: bool = True) -> list[Exception | None]:
        """See `WeightTransfer.send`."""
        failures: Outcomes = {}
        await _each(servers, self._begin, failures)
        try:
            await self._send_stages(servers, failures, flush)
        finally:
            await _each(servers, self._end, failures)
        return [failures.get(server.endpoint[0]) for server in servers]

    def close(self) -> None:
        """See `WeightTransfer.close`."""
        self._update = None

    async def _begin(self, server: Server) -> None:
        try:
            await server.control.begin_weight_update()
        except RequestRefusedError:  # an update that was broken off has left its session open
            await server.control.end_weight_update(timeout_s=self._timeout_s)
            await server.control.begin_weight_update()

    async def _end(self, server: Server) -> None:
        await server.control.end_weight_update(timeout_s=self._timeout_s)

    async def _send_stages(self, servers: Sequence[Server], failures: Outcomes, flush: bool) -> None:
        """All stages to the servers that live; anew to the rest of them where one was lost from among them."""
        while living := [server for server in servers if server.endpoint[0] not in failures]:
            names, broken = [], False
            for stage in range(self._update.weights.num_stages):  # in one order: else two could wait for each other
                sender = self._sender(_destinations(living), stage, flush)
                sent: Sent = await _in_thread(self._update.weights.feed, sender, stage)
                self._note(sent, living, failures)
                names += sent.names
                broken = sent.broken
                living = [server for server in living if server.endpoint[0] not in failures]
                if broken or not living:
                    break
            if not broken:
                if living:
                    self._check_complete(names)
                return

    def _note(self, sent: Sent, servers: Sequence[Server], failures: Outcomes) -> None:
        lost = {url: error for url, error in sent.failures.items() if isinstance(error, ServerLostError)}
        if not sent.broken:
            failures |= sent.failures
        elif lost:
            failures |= lost  # what the others say is what came of it
        else:
            cause = next(iter(sent.failures.values()), None) or RequestRefusedError("the servers' group broke")
            failures |= {server.endpoint[0]: sent.failures.get(server.endpoint[0], cause) for server in servers}
        if self._update.sums is not None and sent.sums is not None:
            self._update.sums.merge(sent.sums)

    def _check_complete(self, names: list[str]) -> None:
        missing = sorted(self._update.expected.keys() - set(names))
        if missing:
            raise WeightSyncError(f"{self._update}: {len(missing)} weights were not sent: {', '.join(missing[:5])}")

    def _sender(self, servers: tuple[Destination, ...], stage: int, flush: bool) -> Sender:
        update = self._update
        is_last = stage == update.weights.num_stages - 1
        largest = sum(tensor.numel() for tensor in update.expected.values()) * torch.float32.itemsize
        return self._make_sender(
            stage,
            servers=servers,
            shapes={name: tuple(tensor.shape) for name, tensor in update.expected.items()},
            bucket_bytes=min(self._bucket_bytes, largest),  # a buffer is no larger than a small model needs
            timeout_s=self._timeout_s,
            version=update.version if is_last else None,
            flush=flush,
            sums=update.sums.emptied() if update.sums is not None else None,
        )

    @abstractmethod
    def _make_sender(self, stage: int, **options: Any) -> Sender:
        """The sender of a stage."""


class TensorTransfer(LiveTransfer):
    """`sync.mode=tensor`, see `TensorSender`."""

    def _make_sender(self, stage: int, **options: Any) -> Sender:
        return TensorSender(**options)

    def close(self) -> None:
        """See `WeightTransfer.close`; what other processes keep goes with them."""
        super().close()
        release_idle()


class DistributedTransfer(LiveTransfer):
    """`sync.mode=distributed`, see `BroadcastSender`."""

    def __init__(self, *, bucket_bytes: int, timeout_s: float):
        super().__init__(bucket_bytes=bucket_bytes, timeout_s=timeout_s)
        self._owner = secrets.token_hex(8)

    def _make_sender(self, stage: int, **options: Any) -> Sender:
        return BroadcastSender(owner=f"{self._owner}-{stage}", **options)


def _check(update: Update) -> None:
    """Raises ValueError where the weights are not those expected."""
    found: dict[str, torch.Tensor] = {}
    for name, shape in update.weights.shapes():
        if name in found:
            raise ValueError(f"weights: {name} was given twice")
        found[name] = torch.empty(shape, device="meta")
    check_weights(found, update.expected, str(update))


def _destinations(servers: Sequence[Server]) -> tuple[Destination, ...]:
    return tuple(
        Destination(
            *server.endpoint,
            tp=server.info.tp,
            device=server.info.device,
            streams=server.info.streams,
            gpus=_uuids(server),
        )
        for server in servers
    )


def _uuids(server: Server) -> tuple[str, ...]:
    """Of the devices of a server that was launched here."""
    return tuple(device_uuid(gpu) for gpu in server.gpus if gpu < torch.cuda.device_count())


async def _each(servers: Sequence[Server], call: Callable, failures: Outcomes) -> None:
    """Make the call of every server that has not failed; note those that do now."""

    async def guarded(server: Server) -> None:
        try:
            await call(server)
        except (ServerLostError, RequestRefusedError) as error:
            failures[server.endpoint[0]] = error

    await asyncio.gather(*(guarded(server) for server in servers if server.endpoint[0] not in failures))


async def _in_thread(function: Callable, *args: Any) -> Any:
    """As `asyncio.to_thread`; where it is cancelled, it first waits for the end of what cannot be broken off."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise
