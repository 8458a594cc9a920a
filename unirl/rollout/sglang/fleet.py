"""All servers of an engine: who gets the next sample, who lives, and what becomes of the dead."""

import asyncio
import contextlib
import functools
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from unirl.errors import UserError
from unirl.rollout.sglang.client import RequestRefusedError, ServerLostError
from unirl.rollout.sglang.control import ServerControl
from unirl.rollout.sglang.server import Server, ServerState

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 60.0
_QUIET_POLL_S = 0.5
_DEPARTED_KEPT = 100


@dataclass(frozen=True)
class FleetLimits:
    """See the keys of the same names in the section `rollout` of the config."""

    max_concurrency: int = 64
    start_timeout_s: float = 600.0
    health_interval_s: float = 10.0
    health_timeout_s: float = 60.0
    max_restarts: int = 3


class WeightGiver(Protocol):
    """Gives one server the weights that the others have."""

    async def at_hand(self) -> None:
        """Returns when the weights can be given, which may be at the next update."""

    async def give(self, server: Server) -> bool:
        """Give them; False where they are not at hand.

        Raises ServerLostError, RequestRefusedError or WeightSyncError where the server does not have them then.
        """


@dataclass(frozen=True)
class Departure:
    """A server that is no longer one of the fleet: it was `removed`, or attached and `lost`."""

    name: str
    url: str | None
    why: str


class Fleet:
    """Servers under supervision: each has a task that looks at it, and revives it where it is dead or hung. Servers
    come (`add`) and go (`drain`) at any time.

    check: raises UserError for a server, just started, that does not go with the others.
    weights: who gives them to a server that comes in or was revived; None before the first were published.
    quiet: servers are paused or without memory, so that silence is no sign of death: only the end of a process is.
    joining: servers on their way in. departed: the last that have left.

    Who takes `_membership`, which `servers` changes under, and the lock of a server takes them in this order.
    """

    def __init__(self, servers: Sequence[Server], limits: FleetLimits, check: Callable[[Server, list[Server]], None]):
        self.servers = list(servers)
        self.limits = limits
        self.weights: WeightGiver | None = None
        self.quiet = False
        self.num_restarts = 0
        self.joining: dict[Server, asyncio.Task] = {}
        self.departed: deque[Departure] = deque(maxlen=_DEPARTED_KEPT)
        self._check = check
        self._numbers = itertools.count()
        self._changed = asyncio.Condition()  # a place for a sample
        self._turned = asyncio.Condition()  # a server's state
        self._membership = asyncio.Lock()
        self._tasks: dict[Server, asyncio.Task] = {}
        self._leaving: dict[Server, asyncio.Event] = {}  # set when its last sample is finished
        self._at_door: set[Server] = set()  # lacks nothing but weights
        self._last_words: set[asyncio.Future] = set()  # held, so that they are spoken
        self._home: dict[int, Server] = {}

    async def start(self) -> None:
        """Start all servers, side by side, and their supervision. Raises UserError where one does not start."""
        starts = (self._start(server, self.limits.start_timeout_s) for server in self.servers)
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        for server in self.servers:
            self._look_after(server)

    async def _start(self, server: Server, limit_s: float) -> None:
        """Raises UserError where it does not start, or does not go with the others."""
        server.name = f"server_{next(self._numbers)}"
        try:
            await server.start(limit_s)
        except ServerLostError as error:
            raise UserError(f"the SGLang server did not start: {error}") from error
        self._check_fit(server)

    def _check_fit(self, server: Server) -> None:
        self._check(server, [other for other in self._tasks if other is not server])

    def _look_after(self, server: Server) -> None:
        server.state = ServerState.UP
        self._tasks[server] = task = asyncio.create_task(self._supervise(server))
        task.add_done_callback(functools.partial(self._note_end, server))

    async def close(self) -> None:
        """Stop supervision and all servers. May be called twice."""
        tasks = [*self.joining.values(), *self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        async with self._turned:
            await self._turned.wait_for(lambda: not self.joining)  # those who wait for them have been told
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def add(self, server: Server) -> None:
        """Take in one more server: it is started or attached, checked, given the weights that the others have, and then
        takes samples. It waits where that cannot be now: where the weights are not at hand, or the servers are quiet.

        Raises UserError where it does not start, does not go with the others, does not take the weights, or was drained
        before it was in; it is stopped then.
        """
        self.joining[server] = joining = asyncio.create_task(self._join(server))
        try:
            await asyncio.wait({joining})
        finally:
            joining.cancel()
            await asyncio.wait({joining})
            del self.joining[server]
            await self._notify()
        if joining.cancelled():
            raise UserError(f"{server} was removed before it had joined")
        joining.result()
        _log.info("%s has joined as %s", server, server.name)

    async def _join(self, server: Server) -> None:
        limits = self.limits
        try:
            await self._start(server, limits.health_timeout_s if server.is_attached else limits.start_timeout_s)
            self._at_door.add(server)
            while not await self._let_in(server):
                while self.quiet:
                    await asyncio.sleep(_QUIET_POLL_S)
                if self.weights is not None:
                    await self.weights.at_hand()
        except (ServerLostError, RequestRefusedError) as error:
            raise UserError(f"{server} did not take the weights: {error}{await server.log_tail()}") from error
        finally:
            self._at_door.discard(server)
            if server not in self.servers:
                await server.stop()

    async def _let_in(self, server: Server) -> bool:
        async with self._membership:  # neither an update nor a pause comes between
            if self.quiet or (self.weights is not None and not await self.weights.give(server)):
                return False
            self.servers = [*self.servers, server]
            self._look_after(server)
            return True

    async def drain(self, server: Server, limit_s: float) -> None:
        """Let a server go: it gets no more samples, those that it has finish, or go on elsewhere after `limit_s`; then
        it is stopped, if it was launched. One that is on its way in is turned away.

        Raises UserError where no other server is up, at once or at the end of the wait: then it serves on.
        """
        if server in self.joining:
            self.joining[server].cancel()
            await asyncio.wait({self.joining[server]})
        if server not in self.servers:
            return
        if server in self._leaving:
            raise UserError(f"{server.name} is being drained already")
        self._check_others(server)
        self._leaving[server] = idle = asyncio.Event()
        try:
            if server.in_flight:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(idle.wait(), limit_s)
            self._check_others(server)
            await asyncio.shield(self._remove(server))
        finally:
            del self._leaving[server]
            await self._notify()

    def is_leaving(self, server: Server) -> bool:
        """Whether it is being drained."""
        return server in self._leaving

    def _check_others(self, server: Server) -> None:
        if not any(other is not server and other not in self._leaving for other in self.living()):
            raise UserError(
                f"{server.name} is the only server that is up, and samples need one: add another before it is removed"
            )

    async def _remove(self, server: Server) -> None:
        if (supervision := self._tasks.pop(server, None)) is not None:
            supervision.cancel()
            await asyncio.wait({supervision})
        async with self._membership:
            self._forget(server, "removed")
        await server.stop()  # what it has not finished goes on elsewhere

    def _forget(self, server: Server, why: str) -> None:
        if server in self.servers:
            self.servers = [other for other in self.servers if other is not server]
            self.departed.append(Departure(server.name, server.address, why))

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
        if server in self._leaving and server.in_flight == 0:
            self._leaving[server].set()
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
        """Wait until no server is on its way but those that still start; raises UserError where none is left. Weights
        must be at hand.
        """
        async with self._turned:
            await self._turned.wait_for(
                lambda: (
                    all(server.state is not ServerState.DOWN for server in self.servers)
                    and (self.quiet or not self._at_door)
                )
            )
        if self._all_failed():
            raise UserError(f"no SGLang server is left: {'; '.join(server.failure for server in self.servers)}")

    @asynccontextmanager
    async def all_locked(self) -> AsyncIterator[None]:
        """Keeps supervisors off every server, and others out; waits for revivals in progress."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._membership)
            for server in self.servers:
                await stack.enter_async_context(server.lock)
            yield

    async def keep_quiet(self) -> None:
        """No server is asked for a sign of life until `end_quiet`: to give one it uses what it has released."""
        self.quiet = True
        async with self.all_locked():
            pass  # checks that were under way have ended
        await self._notify()

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
        free = [
            server
            for server in self.living()
            if server not in self._leaving and server.in_flight < self.limits.max_concurrency
        ]
        home = self._home.get(group)
        return home if home in free else min(free, key=lambda server: server.in_flight, default=None)

    def _all_failed(self) -> bool:
        return all(server.state is ServerState.FAILED for server in self.servers)

    async def _notify(self) -> None:
        for condition in (self._changed, self._turned):
            async with condition:
                condition.notify_all()

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
        if server.is_attached:
            await self._drop(server)

    async def _drop(self, server: Server) -> None:
        """An attached server that is lost is no longer one of ours, unless there is no other to show for it."""
        async with self._membership:
            if any(other.state is not ServerState.FAILED for other in self.servers):
                self._forget(server, "lost")
        self._tasks.pop(server, None)

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
        """Kill what is left of it, start it anew, give it the present weights; after so many attempts give it up.

        One that was attached is not ours to start: it has `health_timeout_s` to be found again where it was.
        """
        launched = not server.is_attached
        limit_s = self.limits.start_timeout_s if launched else self.limits.health_timeout_s
        _log.warning("%s is lost and %s: %s", server, "starts anew" if launched else "looked for", problem)
        while server.restarts < self.limits.max_restarts and server not in self._leaving:
            await server.stop()
            await asyncio.sleep(min(2.0**server.restarts - 1, _LONGEST_PAUSE_S))
            server.restarts += 1
            self.num_restarts += 1
            try:
                await server.start(limit_s)
                self._check_fit(server)
                await self._restore(server)
            except (ServerLostError, RequestRefusedError, UserError) as error:
                problem = str(error)
                _log.warning("%s did not come back: %s", server, problem)
                if launched:
                    continue
                break
            server.state = ServerState.UP
            return
        server.failure = f"{server} was lost, and restarted {server.restarts} times in vain: {problem}"
        if not launched:
            server.failure = f"{server} was lost, and not found again within {limit_s:g} s: {problem}"
        _log.error("%s", server.failure)
        server.state = ServerState.FAILED
        await server.stop()

    async def _restore(self, server: Server) -> None:
        while self.weights is not None and not await self.weights.give(server):
            await self.weights.at_hand()
