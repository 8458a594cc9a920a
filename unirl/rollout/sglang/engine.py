"""`SGLangRolloutEngine`: samples from SGLang servers, behind the protocol of every engine."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.errors import UserError
from unirl.observe.pool_folder import PoolFolder
from unirl.rollout.engine import ProgressCallback
from unirl.rollout.sglang.background import BackgroundLoop
from unirl.rollout.sglang.client import RequestRefusedError, ServerLostError
from unirl.rollout.sglang.control import PauseMode, ServerControl
from unirl.rollout.sglang.fleet import Fleet, FleetLimits
from unirl.rollout.sglang.model import ModelFacts
from unirl.rollout.sglang.pool import Pool, check_alike, find_server
from unirl.rollout.sglang.publisher import Publisher
from unirl.rollout.sglang.sample import Room, Sample
from unirl.rollout.sglang.server import Server, Source
from unirl.rollout.sglang.transfer import WeightSyncError, WeightTransfer
from unirl.rollout.weights import LocalWeights, WeightSource
from unirl.types import Completion, GenerationRequest

_log = logging.getLogger(__name__)
_POLL_S = 0.05


@dataclass(frozen=True)
class EngineOptions:
    """What the engine does beside its servers.

    timeout_s: seconds that a sample may be without a new token before its server is looked at.
    deterministic: samples must depend on their seeds alone; servers that do not are refused.
    checksum_every: compare checksums of all weights at the first weight update and every so many; 0: never.
    checksum_timeout_s: limit for a server to compute them.
    trainer_waits: the policy does not change while `generate` runs, so that a server that is lost meanwhile can be
    given its weights again by a transfer that keeps none; else such a server waits for the next update.
    release_timeout_s: limit for a server to release its memory and to take it again.
    """

    timeout_s: float = 600.0
    deterministic: bool = True
    checksum_every: int = 20
    checksum_timeout_s: float = 600.0
    trainer_waits: bool = True
    release_timeout_s: float = 600.0


class SGLangRolloutEngine:
    """Samples from the model in `model_path` on SGLang servers; a `RolloutEngine`.

    Servers that die or hang are restarted, their samples go on elsewhere with the tokens that had come. A sample's
    tokens depend on its seed alone where the servers are deterministic; log-probs vary with the batch by rounding.
    """

    def __init__(
        self,
        model_path: str | Path,
        servers: Sequence[Source],
        transfer: WeightTransfer,
        *,
        limits: FleetLimits | None = None,
        options: EngineOptions | None = None,
        api_key: str | None = None,
    ):
        """model_path: Hugging Face folder, the one that the servers started from.

        servers: how to launch each, or its URL where it runs already, with its `api_key`.
        transfer: the way that `update_weights` takes.

        Raises UserError where a server does not start or is not what the options ask for.
        """
        self.weight_version = 0
        self._model_path = Path(model_path)
        self._model = ModelFacts(self._model_path)
        self._transfer = transfer
        self._options = options or EngineOptions()
        self._num_resubmitted = 0
        self._weights_known = True
        self._paused: PauseMode | None = None
        self._memory_released = False
        self._closed = False
        self._pool: Pool | None = None
        self._loop = BackgroundLoop("sglang-engine")
        try:
            self._fleet: Fleet = self._loop.run(self._start(servers, limits or FleetLimits(), api_key))
        except BaseException:
            self._loop.close()
            raise
        self._publisher = Publisher(
            self._fleet,
            self._model,
            transfer,
            checksum_every=self._options.checksum_every,
            checksum_timeout_s=self._options.checksum_timeout_s,
        )

    async def _start(self, servers: Sequence[Source], limits: FleetLimits, api_key: str | None) -> Fleet:
        fleet = Fleet([Server(source, api_key=api_key) for source in servers], limits, self._check_server)
        await fleet.start()
        return fleet

    def _check_server(self, server: Server, others: Sequence[Server]) -> None:
        """Raises UserError where the server cannot stand in for `others`."""
        if self._options.deterministic and not server.info.deterministic:
            raise UserError(
                f"{server} does not take seeds: start it with --enable-deterministic-inference, or set "
                "rollout.deterministic=false (samples then differ from run to run)"
            )
        if others:
            check_alike(server, others, self._model)

    def add_server(self, source: Source, *, api_key: str | None = None) -> str:
        """Take in one more server while samples are drawn, or at any other time: launch it, or attach to its URL.

        Returns its name when it takes samples: checked, and with the weights that the others have. That can last until
        the next `update_weights`, where the transfer keeps no weights and the policy may change, and until servers that
        are paused or without memory are in use again; so call it from another thread than those.

        Raises UserError where it does not start, is not like the others or does not take the weights.
        """
        self._check_open()
        return self._loop.run(self._add_server(source, api_key))

    async def _add_server(self, source: Source, api_key: str | None) -> str:
        server = Server(source, api_key=api_key)
        for known in (*self._fleet.servers, *self._fleet.joining):
            if server.is_attached and known.endpoint[0] == server.endpoint[0]:
                raise UserError(f"{server} is one of the pool already, as {known.name}")
        await self._fleet.add(server)
        return server.name

    def remove_server(self, server: str, *, limit_s: float = 600.0) -> None:
        """Let a server (its name or URL) go when its samples are finished; after `limit_s` they go on elsewhere.

        Raises UserError where there is no such server, or no other one is up.
        """
        self._check_open()
        self._loop.run(self._remove_server(server, limit_s))

    async def _remove_server(self, name_or_url: str, limit_s: float) -> None:
        await self._fleet.drain(find_server(self._fleet, name_or_url), limit_s)

    def open_pool(self, path: Path) -> None:
        """Let `python -m unirl.cluster` show, add and remove servers by way of the folder `path`, until `close`."""
        self._check_open()
        self._pool = Pool(PoolFolder(path), self._model_path, self._fleet, self._add_server, self._remove_server)
        self._loop.run(self._pool.open())

    def generate(
        self, requests: Sequence[GenerationRequest], on_progress: ProgressCallback | None = None
    ) -> list[list[Completion]]:
        """See `RolloutEngine.generate`. A sample also ends, truncated, where the server's context length ends.

        Raises UserError where no server is left, RuntimeError while memory is released.
        """
        self._check_open()
        if self._memory_released:
            raise RuntimeError("the servers' memory is released: update the weights before samples are drawn")
        if not self._weights_known:
            raise WeightSyncError("the last weight update failed, so that servers may differ: update the weights first")
        room = Room.of([server.info for server in self._fleet.servers], self._model.max_positions)
        for number, request in enumerate(requests):
            self._model.check_request(number, request, room.prompt)
        groups = [[Sample(request, index, room) for index in range(len(request.seeds))] for request in requests]
        self._loop.run(self._complete_all(groups, on_progress or (lambda finished: None)))
        return [[sample.completion() for sample in group] for group in groups]

    async def _complete_all(self, groups: list[list[Sample]], on_progress: ProgressCallback) -> None:
        async with AsyncExitStack() as stack:
            if self._options.trainer_waits:
                await stack.enter_async_context(self._publisher.weights_rest())
            await self._publisher.flush_stale_cache()
            await self._complete_each(groups, on_progress)

    async def _complete_each(self, groups: list[list[Sample]], on_progress: ProgressCallback) -> None:
        self._fleet.forget_groups()
        finished = 0

        async def complete(number: int, sample: Sample) -> None:
            nonlocal finished
            await self._complete(number, sample)
            finished += 1
            on_progress(finished)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, group in enumerate(groups):
                    for sample in group:
                        tasks.create_task(complete(number, sample))
        except BaseExceptionGroup as failures:
            error = failures.exceptions[0]
            if isinstance(error, RequestRefusedError):
                raise UserError(f"SGLang refused a sample: {error}") from error
            raise error from None

    async def _complete(self, group: int, sample: Sample) -> None:
        """Ask for the sample until it is whole: again where a server was lost, with the tokens that had come."""
        while sample.status is None:
            server = await self._fleet.acquire(group)
            try:
                events = server.control.client.stream("/generate", sample.body(), silence_s=self._options.timeout_s)
                async with aclosing(events):
                    async for event in events:
                        server.heard()
                        sample.take(event)
            except ServerLostError as error:
                if sample.status is None:
                    self._num_resubmitted += 1
                    _log.info("a sample of %d tokens so far goes on elsewhere: %s", len(sample.token_ids), error)
                    self._fleet.report_lost(server)
                    sample.close_if_complete()
            finally:
                await self._fleet.release(server)

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.update_weights`. Weights that are not the model's are refused before any server sees them.

        A `WeightSource` may be asked for its weights again, for a server that is revived, until the next update; of
        other weights, all are held until then. Samples in progress go on with the new weights between two tokens.
        Memory that was released is taken again.

        A server that is lost meanwhile is revived with the new weights. Raises WeightSyncError where a server refuses
        them or holds others afterwards: nothing can be generated then until an update succeeds.
        """
        self._check_open()
        source = weights if isinstance(weights, WeightSource) else LocalWeights.holding(weights)
        self._loop.run(self._publisher.hold())
        try:
            self._publisher.stage(source, version)
        finally:
            self._loop.run(self._publisher.let_go())
        self._weights_known = False
        if self._memory_released:
            self._loop.run(self._take_memory())
        self._loop.run(self._publisher.publish(self._paused))
        self._weights_known = True
        self.weight_version = version

    async def _take_memory(self) -> None:
        await self._fleet.each(lambda control: control.resume_memory(timeout_s=self._options.release_timeout_s))
        self._memory_released = False
        self._fleet.end_quiet()

    def release_memory(self) -> None:
        """See `RolloutEngine.release_memory`. Raises RuntimeError while samples are in progress."""
        self._check_open()
        if not self._memory_released:
            self._loop.run(self._release_memory())

    async def _release_memory(self) -> None:
        in_flight = sum(server.in_flight for server in self._fleet.servers)
        if in_flight:
            raise RuntimeError(f"{in_flight} samples are in progress: memory is released between two generations")
        async with self._publisher.weights_rest():  # a server that is being revived gets its weights first
            await self._fleet.keep_quiet()
        self._memory_released = True
        await self._fleet.each(self._release_when_idle)

    async def _release_when_idle(self, control: ServerControl) -> None:
        while await control.running():  # the step behind the last token
            await asyncio.sleep(_POLL_S)
        await control.release_memory(timeout_s=self._options.release_timeout_s)

    def metrics(self) -> dict[str, float]:
        """See `RolloutEngine.metrics`: servers that are up, restarts, samples that went on elsewhere, speed of the last
        update.
        """
        return {
            "rollout/servers": len(self._fleet.living()),
            "rollout/server_restarts": self._fleet.num_restarts,
            "rollout/samples_resubmitted": self._num_resubmitted,
            **self._publisher.metrics(),
        }

    def pause(self, mode: PauseMode) -> None:
        """Stop decoding on all servers; see `PauseMode`."""
        self._loop.run(self._fleet.keep_quiet())
        self._on_all(lambda control: control.pause(mode))
        self._paused = mode

    def resume(self) -> None:
        """Go on after `pause`."""
        self._on_all(lambda control: control.resume())
        self._paused = None
        self._fleet.end_quiet()

    def abort_all(self) -> None:
        """End all samples in progress; they come back as aborted, with the tokens they have."""
        self._on_all(lambda control: control.abort_all())

    def _on_all(self, call: Callable[[ServerControl], Awaitable[None]]) -> None:
        async def on_all() -> None:
            await asyncio.gather(*(call(server.control) for server in self._fleet.living()))

        self._loop.run(on_all())

    @property
    def controls(self) -> list[ServerControl]:
        """Of the servers that are up; their coroutines are run by `run`."""
        return [server.control for server in self._fleet.living()]

    @property
    def endpoints(self) -> list[tuple[str, str | None]]:
        """URL and API key of the servers that are up, for another process that is to share them."""
        return [server.endpoint for server in self._fleet.living()]

    @property
    def server_pids(self) -> list[int | None]:
        """Head of each server's process tree; None for one that was not launched here."""
        return [server.pid for server in self._fleet.servers]

    def run(self, coroutine: Coroutine) -> Any:
        """Run a coroutine of `controls` to its end."""
        return self._loop.run(coroutine)

    def close(self) -> None:
        """See `RolloutEngine.close`: servers that were launched here are gone when it returns."""
        if self._closed:
            return
        self._closed = True
        if self._pool is not None:
            self._loop.run(self._pool.close())
        self._loop.run(self._fleet.close())
        self._loop.close()
        self._transfer.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the rollout engine is closed")
