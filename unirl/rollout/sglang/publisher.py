"""The common frame of every way to bring weights to servers: names, checksums, lost servers, refusals."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from unirl.errors import UserError
from unirl.rollout.sglang.checksums import ChecksumCollector, count_experts
from unirl.rollout.sglang.client import ServerLostError
from unirl.rollout.sglang.control import PauseMode
from unirl.rollout.sglang.fleet import Fleet
from unirl.rollout.sglang.model import ModelFacts
from unirl.rollout.sglang.server import Server
from unirl.rollout.sglang.transfer import Update, WeightSyncError, WeightTransfer
from unirl.rollout.weights import WeightSource


class Publisher:
    """Publishes weights to the servers of `fleet` by way of `transfer`.

    checksum_every: compare checksums of all weights at the first publication and every so many; 0: never.
    checksum_timeout_s: limit for a server to compute them.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: ModelFacts,
        transfer: WeightTransfer,
        *,
        checksum_every: int,
        checksum_timeout_s: float,
    ):
        self._fleet = fleet
        self._model = model
        self._transfer = transfer
        self._checksum_every = checksum_every
        self._checksum_timeout_s = checksum_timeout_s
        self._num_published = 0
        self._sums: ChecksumCollector | None = None
        self._version = 0
        self._seconds = 0.0
        self._cache_is_stale = False
        self._num_resting = 0
        self._weights_rest = asyncio.Event()
        self._sending = asyncio.Lock()

    async def hold(self) -> None:
        """No server is given weights by itself until `let_go`: those that are at hand are about to be replaced."""
        await self._sending.acquire()

    async def let_go(self) -> None:
        """See `hold`."""
        self._sending.release()

    def stage(self, weights: WeightSource, version: int) -> None:
        """Take up weights. Raises ValueError where they are not the model's, and then no server sees any of them;
        UserError where checksums are due and cannot be computed.
        """
        started = time.perf_counter()
        self._sums = self._checksums_if_due()
        self._transfer.stage(Update(weights, version, self._model.weights, self._sums))
        self._version = version
        self._seconds = time.perf_counter() - started

    def _checksums_if_due(self) -> ChecksumCollector | None:
        every = self._checksum_every
        if every == 0 or self._num_published % every:
            return None
        info = self._fleet.servers[0].info
        sums = ChecksumCollector(
            device=info.device,
            dtype=getattr(torch, info.dtype),
            tp=info.tp,
            head_dim=self._model.head_dim,
            num_experts=count_experts(self._model.weights),
        )
        if unknown := sums.unknown(self._model.weights):
            raise UserError(
                f"it is not known how an SGLang server stores {', '.join(unknown[:5])}, so that checksums cannot be "
                "compared: set sync.checksum_every=0"
            )
        return sums

    async def publish(self, paused: PauseMode | None = None) -> None:
        """Send the staged weights to all servers; one that is lost meanwhile is revived with them.

        paused: how the servers stand still already; None: they are stopped for the update, so that it falls between two
        tokens. What is in progress goes on after it, or is aborted where the update fails.

        Raises WeightSyncError where a server refuses them or holds others afterwards, UserError where none is left.
        """
        self._fleet.weights = self
        async with self.weights_rest():
            async with self._fleet.all_locked():  # a revival in progress ends first
                if paused is None:
                    await self._fleet.each(lambda control: control.pause("retract"))
                try:
                    await self._send(self._fleet.living(), flush=paused != "in_place")
                    self._cache_is_stale = paused == "in_place"
                except BaseException:
                    await self._fleet.each(lambda control: control.abort_all())
                    raise
                finally:
                    if paused is None:
                        await self._fleet.each(lambda control: control.resume())
            for server in self._fleet.servers:
                server.restarts = 0
            await self._fleet.settled()
        self._num_published += 1

    def metrics(self) -> dict[str, float]:
        """Of the last publication: gigabytes of the model, in the servers' dtype, per second of staging and sending."""
        if not self._num_published:
            return {}
        itemsize = getattr(torch, self._fleet.servers[0].info.dtype).itemsize
        num_bytes = sum(weight.numel() for weight in self._model.weights.values()) * itemsize
        return {"sync/gb_per_s": num_bytes / 1e9 / self._seconds}

    async def flush_stale_cache(self) -> None:
        """Forget what an update in place left in the prefix caches; no sample may be in progress."""
        if self._cache_is_stale:
            await self._fleet.each(lambda control: control.flush_cache())
            self._cache_is_stale = False

    @asynccontextmanager
    async def weights_rest(self) -> AsyncIterator[None]:
        """While the model that weights are taken from does not change, so that a server can be revived with them."""
        self._num_resting += 1
        self._weights_rest.set()
        try:
            yield
        finally:
            self._num_resting -= 1
            async with self._sending:  # a revival in progress ends first
                if self._num_resting == 0:
                    self._weights_rest.clear()

    async def _send(self, servers: Sequence[Server], flush: bool) -> None:
        started = time.perf_counter()
        outcomes = await self._transfer.send(servers, flush=flush)
        self._seconds += time.perf_counter() - started
        for server, outcome in zip(servers, outcomes, strict=True):
            await self._follow_up(server, outcome)

    async def _follow_up(self, server: Server, outcome: Exception | None) -> None:
        if isinstance(outcome, ServerLostError):
            return self._fleet.report_lost(server)
        if outcome is not None:
            raise WeightSyncError(f"{server} refused the weights: {outcome}{await server.log_tail()}") from outcome
        server.weight_version = self._version
        try:
            await self._verify(server, self._sums)
        except ServerLostError:
            self._fleet.report_lost(server)

    async def at_hand(self) -> None:
        """See `WeightGiver`."""
        if not self._transfer.keeps_weights:
            await self._weights_rest.wait()

    async def give(self, server: Server) -> bool:
        """See `WeightGiver`."""
        async with self._sending:
            if not self._transfer.keeps_weights and not self._weights_rest.is_set():
                return False
            version, sums = self._version, self._sums
            [outcome] = await self._transfer.send([server])
        if outcome is not None:
            raise outcome
        server.weight_version = version
        await self._verify(server, sums)
        return True

    async def _verify(self, server: Server, sums: ChecksumCollector | None) -> None:
        if sums is None:
            return
        found = await server.control.checksums(timeout_s=self._checksum_timeout_s)
        for rank, (ours, theirs) in enumerate(zip(sums.ranks, found, strict=True)):
            names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise WeightSyncError(
                    f"{server}, TP rank {rank}: after the update {len(names)} of {len(ours)} weights differ from the "
                    f"trainer's: {', '.join(names[:5])}{more}"
                )
