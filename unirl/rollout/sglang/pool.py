"""The pool of servers of a running job, as its user sees and changes it."""

import asyncio
import contextlib
import difflib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unirl.errors import UserError
from unirl.observe.pool_folder import SIGN_OF_LIFE_S, PoolFolder, Presence, Reply, Request
from unirl.rollout.sglang.fleet import Fleet
from unirl.rollout.sglang.model import ModelFacts
from unirl.rollout.sglang.sample import Room
from unirl.rollout.sglang.server import Server, ServerState

_log = logging.getLogger(__name__)
_POLL_S = 1.0

_ALIKE = ("model_type", "dtype", "device", "tp")


class Pool:
    """The run's end of a `PoolFolder`: shows the servers of `fleet` there, and does what it is asked to.

    add(url, api_key), returning a name, and remove(name or URL, limit in s) are called for the requests `add` {url,
    api_key} and `remove` {server, limit_s}.

    A server is shown as {name, url, state, launched, samples, weight_version, restarts}; its state is joining, serving,
    draining, restarting (of one that was attached: looked for) or lost.
    """

    def __init__(
        self,
        folder: PoolFolder,
        model_path: Path,
        fleet: Fleet,
        add: Callable[[str, str | None], Awaitable[str]],
        remove: Callable[[str, float], Awaitable[None]],
    ):
        self._folder = folder
        self._model_path = str(model_path.absolute())
        self._fleet = fleet
        self._add, self._remove = add, remove
        self._run_id = secrets.token_hex(8)
        self._shown: Presence | None = None
        self._watching: asyncio.Task | None = None
        self._answering: set[asyncio.Task] = set()

    async def open(self) -> None:
        """Show the servers and take requests from now on. Raises UserError where the folder is not fit for that."""
        try:
            await asyncio.to_thread(self._folder.open)
            await self._show()
        except OSError as error:
            raise UserError(
                f"{self._folder.path} cannot be written: {error.strerror}; make room, or mend its rights"
            ) from error
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Show and do nothing more; requests that are not done never are. May be called twice."""
        if self._watching is None:
            return
        tasks, self._watching = [self._watching, *self._answering], None
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        with contextlib.suppress(OSError):  # it is seen all the same, by the signs of life that no longer come
            await asyncio.to_thread(self._folder.close)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._show()
                requests = await asyncio.to_thread(self._folder.take_requests, self._run_id)
            except OSError as error:  # of a file system that is away for a while; the run can do without
                _log.warning("%s: %s", self._folder.path, error)
                continue
            for request in requests:
                task = asyncio.create_task(self._answer(request))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _show(self) -> None:
        servers = [_shown(server, self._fleet) for server in (*self._fleet.servers, *self._fleet.joining)]
        departed = [asdict(departure) for departure in self._fleet.departed]
        last = self._shown
        is_news = last is None or (last.servers, last.departed) != (servers, departed)
        if is_news or time.time() - last.written_at > SIGN_OF_LIFE_S:
            self._shown = Presence(self._run_id, self._model_path, servers, departed)
            await asyncio.to_thread(self._folder.show, self._shown)

    async def _answer(self, request: Request) -> None:
        try:
            reply = Reply(True, await self._do(request.action, request.arguments))
        except UserError as error:
            reply = Reply(False, str(error))
        try:
            await self._show()  # who has the answer sees what came of it
            await asyncio.to_thread(self._folder.reply, request, reply)
        except OSError as error:
            _log.warning("%s: %s", self._folder.path, error)

    async def _do(self, action: str, arguments: dict[str, Any]) -> str:
        match action, arguments:
            case "add", {"url": str(url), "api_key": str() | None as api_key}:
                return f"{await self._add(checked_url(url), api_key)} takes samples at {url}"
            case "remove", {"server": str(server), "limit_s": int() | float() as limit_s}:
                await self._remove(server, limit_s)
                return f"{server} is drained and gone"
        raise UserError(f"the run does not know what to do about {action!r}: use the unirl that it runs with")


def _shown(server: Server, fleet: Fleet) -> dict[str, Any]:
    states = {ServerState.UP: "serving", ServerState.DOWN: "restarting", ServerState.FAILED: "lost"}
    state = "joining" if server in fleet.joining else states[server.state]
    return {
        "name": server.name,
        "url": server.address,
        "state": "draining" if fleet.is_leaving(server) else state,
        "launched": not server.is_attached,
        "samples": server.in_flight,
        "weight_version": server.weight_version,
        "restarts": max(server.lives - 1, 0),
    }


def checked_url(url: str) -> str:
    """The URL of a server without its trailing slash. Raises UserError where it is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.username:
        raise UserError(f"{url}: expected the URL of a server, e.g. http://node7:30000")
    return url.rstrip("/")


def find_server(fleet: Fleet, name_or_url: str) -> Server:
    """Raises UserError, with the nearest name, where there is none of that name or URL."""
    servers = [*fleet.servers, *fleet.joining]
    for server in servers:
        if name_or_url.rstrip("/") in (server.name, server.address):
            return server
    names = [server.name for server in servers]
    pool = [*names, *(server.address for server in servers if server.address)]
    nearest = difflib.get_close_matches(name_or_url, pool, n=1, cutoff=0)[0]
    raise UserError(f"no server {name_or_url} in the pool; the nearest is {nearest} (it has {', '.join(names)})")


def check_alike(server: Server, others: Sequence[Server], model: ModelFacts) -> None:
    """Raises UserError where a sample of `others` could not go on at `server`, or their checksums would differ."""
    found, expected = server.info, others[0].info
    for name in _ALIKE:
        ours, theirs = getattr(found, name), getattr(expected, name)
        if ours != theirs:
            raise UserError(f"{server} has {name} {ours}, the others have {theirs}: start it with the same options")
    room = Room.of([other.info for other in others], model.max_positions)
    alone = Room.of([found], model.max_positions)
    if alone.whole < room.whole or alone.prompt < room.prompt:
        raise UserError(
            f"{server} takes samples of {alone.whole} tokens and prompts of {alone.prompt}, the others {room.whole} "
            f"and {room.prompt}: start it with the same context length and max_total_tokens"
        )
