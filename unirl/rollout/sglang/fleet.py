"""All servers of an engine: who gets the next sample, who lives, and what becomes of the dead."""

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from unirl.errors import UserError
from unirl.rollout.sglang.client import RequestRefusedError, ServerLostError
from unirl.rollout.sglang.control import ServerControl
from unirl.rollout.sglang.server import Server, ServerState
from unirl.rollout.sglang.transfer import WeightSyncError

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True)
class FleetLimits:
    """See the keys of the same names in the section `rollout` of the config."""

    max_concurrency: int = 64
    start_timeout_s: float = 600.0
    health_interval_s: float = 10.0
    health_timeout_s: float = 60.0
    max_restarts: int = 3


class Fleet:
    """Servers under supervision: each has a task that looks at it, and revives it where it is dead or hung.

    restore: gives a revived server the weights that the others have; None before the first weights were published.
    quiet: servers are paused or without memory, so that silence is no sign of death: only the end of a process is.
    """

    def __init__(self, servers: Sequence[Server], limits: FleetLimits):
        self.servers = list(servers)
        self.limits = limits
        self.restore: Callable[[Server], Awaitable[None]] | None = None
        self.quiet = False
        self.num_restarts = 0
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task] = []
        self._last_words: set[asyncio.Future] = set()  # held, so that they are spoken
        self._home: dict[int, Server] = {}

    async def start(self) -> None:
        """Start all servers, side by side, and their supervision. Raises UserError where one does not start."""
        outcomes = await asyncio.gather(
            *(server.start(self.limits.start_timeout_s) for server in self.servers), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self.close()
        for failure in failures:
            if isinstance(failure, ServerLostError):
                raise UserError(f"the SGLang server did not start: {failure}") from failure
            raise failure
        for server in self.servers:
            server.state = ServerState.UP
            task = asyncio.create_task(self._supervise(server))
            task.add_done_callback(functools.partial(self._note_end, server))
            self._tasks.append(task)

    async def close(self) -> None:
        """Stop supervision and all servers. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def acquire(self, group: int) -> Server:
        """A server with room for a sample of `group`, as soon as there is one; `release` gives the place back.

        It is the least loaded one; the samples of a group go where its first went (its prompt is cached there) unless
        that has no room. Raises UserError where no server is left.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._choose(group) is not None or self._all_failed())
            server = self._choose(group)
            if server is None:
                raise UserError(f"no SGLang server is left: {'; '.join(server.failure for server in self.servers)}")
            self._home[group] = server
            server.in_flight += 1
            return server

    async def release(self, server: Server) -> None:
        """Give back a place that `acquire` gave."""
        server.in_flight -= 1
        async with self._changed:
            self._changed.notify()  # one place, one of those who wait

    def forget_groups(self) -> None:
        """Groups of the next call are others, though their numbers come again."""
        self._home.clear()

    def report_lost(self, server: Server) -> None:
        """Note that `server` broke off a request: it gets no more until its supervisor has looked at it."""
        if server.state is ServerState.UP:
            server.state = ServerState.DOWN
        server.suspected.set()

    async def settled(self) -> None:
        """Wait until no server is on its way; raises UserError where none is left."""
        async with self._changed:
            await self._changed.wait_for(lambda: all(server.state is not ServerState.DOWN for server in self.servers))
        if self._all_failed():
            raise UserError(f"no SGLang server is left: {'; '.join(server.failure for server in self.servers)}")

    @asynccontextmanager
    async def all_locked(self) -> AsyncIterator[None]:
        """Keeps supervisors off every server; waits for revivals in progress."""
        async with AsyncExitStack() as stack:
            for server in self.servers:
                await stack.enter_async_context(server.lock)
            yield

    async def keep_quiet(self) -> None:
        """No server is asked for a sign of life until `end_quiet`: to give one it uses what it has released."""
        self.quiet = True
        async with self.all_locked():
            pass  # checks that were under way have ended

    def end_quiet(self) -> None:
        """Ask again, after the usual time of silence from now on: weights may have to come first."""
        for server in self.servers:
            server.heard()
        self.quiet = False

    def living(self) -> list[Server]:
        """Servers that are UP."""
        return [server for server in self.servers if server.state is ServerState.UP]

    async def each(self, call: Callable[[ServerControl], Awaitable[None]]) -> None:
        """Make the call of every living server; one that is lost or refuses is looked at by its supervisor."""

        async def guarded(server: Server) -> None:
            try:
                await call(server.control)
            except (ServerLostError, RequestRefusedError) as error:
                _log.warning("%s: %s", server, error)
                self.report_lost(server)

        await asyncio.gather(*(guarded(server) for server in self.living()))

    def _choose(self, group: int) -> Server | None:
        free = [server for server in self.living() if server.in_flight < self.limits.max_concurrency]
        home = self._home.get(group)
        return home if home in free else min(free, key=lambda server: server.in_flight, default=None)

    def _all_failed(self) -> bool:
        return all(server.state is ServerState.FAILED for server in self.servers)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _supervise(self, server: Server) -> None:
        while server.state is not ServerState.FAILED:
            await self._wait_for_reason_to_look(server)
            async with server.lock:
                server.suspected.clear()
                problem = await self._problem(server)
                if problem is not None:
                    await self._revive(server, problem)
                elif server.state is ServerState.DOWN:
                    server.state = ServerState.UP
            await self._notify()

    def _note_end(self, server: Server, supervision: asyncio.Task) -> None:
        """A server that nobody looks after takes no samples: else those who wait for it would wait for ever."""
        if supervision.cancelled() or supervision.exception() is None:
            return
        server.failure = f"{server} could not be revived: {supervision.exception()!r}"
        _log.error("%s", server.failure)
        server.state = ServerState.FAILED
        self._last_words.add(asyncio.ensure_future(self._notify()))

    async def _wait_for_reason_to_look(self, server: Server) -> None:
        """A report, or a time of silence; tokens that come are a sign of life that costs nothing."""
        while True:
            silence = time.monotonic() - server.last_heard
            remaining = self.limits.health_interval_s - silence
            if server.suspected.is_set() or remaining <= 0:
                return
            try:
                await asyncio.wait_for(server.suspected.wait(), remaining)
            except TimeoutError:
                continue

    async def _problem(self, server: Server) -> str | None:
        try:
            await server.check_process()
            if not self.quiet:
                await server.control.health(self.limits.health_timeout_s)
        except (ServerLostError, RequestRefusedError) as error:
            return str(error)
        server.heard()
        return None

    async def _revive(self, server: Server, problem: str) -> None:
        """Kill what is left of it, start it anew, give it the present weights; after so many attempts give it up."""
        while server.restarts < self.limits.max_restarts:
            _log.warning("%s is lost and starts anew: %s", server, problem)
            await server.stop()
            await asyncio.sleep(min(2.0**server.restarts - 1, _LONGEST_PAUSE_S))
            server.restarts += 1
            self.num_restarts += 1
            try:
                await server.start(self.limits.start_timeout_s)
                if self.restore is not None:
                    await self.restore(server)
            except (ServerLostError, RequestRefusedError, WeightSyncError) as error:
                problem = str(error)
                continue
            server.state = ServerState.UP
            return
        server.failure = f"{server} was lost, and restarted {server.restarts} times in vain: {problem}"
        _log.error("%s", server.failure)
        server.state = ServerState.FAILED
        await server.stop()
