"""`python -m unirl.cluster serve`: a server of this machine for the pool of a run, for as long as both live."""

import asyncio
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path

from unirl.cluster.runs import find_run, saved_config
from unirl.errors import UserError
from unirl.observe.pool_folder import PoolFolder, Presence, Request, RunEndedError
from unirl.rollout.sglang import Server, ServerLostError, ServerOptions
from unirl.trainer.sglang_setup import local_servers

_POLL_S = 2.0
_ANSWER_LIMIT_S = 60.0


@dataclass(frozen=True)
class ServeOptions:
    """host: address of this machine that the run reaches it at; None: found by the way to the run's machine.

    limit_s: for samples to finish when it leaves. wait_s: for a run to come, the first one or the next.
    """

    run_dir: Path
    host: str | None
    limit_s: float
    wait_s: float


async def serve(options: ServeOptions, say: Callable[[str], None]) -> None:
    """Launch a server like the run's own, have it join, and stay until SIGTERM, SIGUSR1 or Ctrl-C comes (then it is
    drained; a second one ends it at once), it is removed by command, or no run has come for `wait_s`.

    Raises UserError where there is no run, the run does not take the server, or the server does not start or dies.
    """
    asked, pressed = _signals()
    presence = await _unless(asked, _wait_for_run(options))
    if presence is not None:
        await _serve(launch_options(options, presence), options, say, asked, pressed)


async def _serve(
    launch: ServerOptions,
    options: ServeOptions,
    say: Callable[[str], None],
    asked: asyncio.Event,
    pressed: asyncio.Event,
) -> None:
    server = Server(launch)
    visit = Visit(server, options, say)
    say(f"{socket.gethostname()}: starting a server for the run in {options.run_dir}; its log: {launch.log_path}")
    try:
        if await _unless(asked, visit.stay()) is None:
            say("asked to leave: no new samples; those in progress finish first")
            await _unless(pressed, visit.leave())
    finally:
        await server.stop()
    say("the server is stopped")


def launch_options(options: ServeOptions, presence: Presence) -> ServerOptions:
    """Those of the run's own servers, on the devices that this process sees. Raises UserError where it cannot run here,
    or the run could not give it weights.
    """
    config, here = saved_config(options.run_dir), socket.gethostname()
    if config.sync.mode == "tensor" and presence.host != here:
        raise UserError(
            f"sync.mode=tensor reaches servers on the run's machine alone, {presence.host}, and this is {here}: start "
            "the run with sync.mode=distributed or disk"
        )
    model = Path(presence.model_path)
    if not model.is_dir():
        raise UserError(f"{here} does not see the run's model, {model}: put it where all machines see it")
    [launch] = local_servers(config, model, 1)
    log_path = options.run_dir / "logs" / f"sglang_{here}_{os.getpid()}.log"
    host = options.host or ("127.0.0.1" if presence.host == here else _own_address(presence.host))
    return replace(launch, gpus=(), host=host, log_path=log_path)


class Visit:
    """A server of this process in the pools of the runs that live in the run directory, one after the other."""

    def __init__(self, server: Server, options: ServeOptions, say: Callable[[str], None]):
        self._server = server
        self._options = options
        self._say = say
        self._folder = PoolFolder(options.run_dir / "pool")

    async def stay(self) -> bool:
        """True at the end: removed by command, or no run has come for `wait_s`. Raises UserError, see `serve`."""
        try:
            await self._server.start(saved_config(self._options.run_dir).rollout.start_timeout_s)
            while (presence := await self._next_run()) is not None:
                if await self._join(presence) and not await self._is_member_until_lost(presence):
                    self._say("removed from the pool")
                    return True
        except ServerLostError as error:
            raise UserError(f"the SGLang server is gone: {error}") from error
        self._say(f"no run has lived in {self._options.run_dir} for {self._options.wait_s:g} s")
        return True

    async def leave(self) -> bool:
        """Have the run drain the server, at most for `limit_s`; True at the end, whatever the run says."""
        deadline, said = time.monotonic() + self._options.limit_s, ""
        while (presence := self._folder.presence()) is not None and self._is_in(presence):
            remaining = max(deadline - time.monotonic(), 0)
            body = {"server": self._server.address, "limit_s": remaining}
            try:
                self._say(await self._ask(presence, "remove", body, remaining + _ANSWER_LIMIT_S))
                return True
            except UserError as error:  # it is the last one, perhaps: another may come
                if said != str(error):
                    said = str(error)
                    self._say(said)
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        return True

    async def _next_run(self) -> Presence | None:
        try:
            return await _wait_for_run(self._options)
        except UserError:
            return None

    async def _join(self, presence: Presence) -> bool:
        """Whether it is one of the pool now; the run may have ended instead."""
        url, api_key = self._server.endpoint
        try:
            self._say(await self._ask(presence, "add", {"url": url, "api_key": api_key}, math.inf))
        except RunEndedError:
            return False
        return True

    async def _is_member_until_lost(self, presence: Presence) -> bool:
        """Returns when the server is in no pool any more: True where it is to look for one again."""
        while True:
            await self._server.check_process()
            present = self._folder.presence()
            if present is None or present.run_id != presence.run_id:
                return True
            if not self._is_in(present):
                url = self._server.address
                why = [departed["why"] for departed in present.departed if departed["url"] == url]
                return why[-1:] != ["removed"]
            await asyncio.sleep(_POLL_S)

    def _is_in(self, presence: Presence) -> bool:
        return any(server["url"] == self._server.address for server in presence.servers)

    async def _ask(self, presence: Presence, action: str, arguments: dict, timeout_s: float) -> str:
        return await self._folder.ask(Request(presence.run_id, action, arguments), timeout_s=timeout_s)


async def _wait_for_run(options: ServeOptions) -> Presence:
    """Raises UserError where none has come for `wait_s`."""
    deadline = time.monotonic() + options.wait_s
    while True:
        try:
            return find_run(options.run_dir)[1]
        except UserError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(_POLL_S)


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set when the first signal to leave comes, and when the second does."""
    asked, pressed = asyncio.Event(), asyncio.Event()

    def handle() -> None:
        (pressed if asked.is_set() else asked).set()

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle)
    return asked, pressed


async def _unless(event: asyncio.Event, work: Coroutine):
    """The result of `work`; None where the event came first: `work` has been broken off then."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        broken_off = working.cancel()
        waiting.cancel()
        await asyncio.wait({working, waiting})
    return None if broken_off else working.result()


def _own_address(towards: str) -> str:
    """The address of this machine that `towards` can reach."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((socket.gethostbyname(towards), 80))
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"the run's machine, {towards}, is not found ({error}): name this one with --host") from error
