"""One server over its lives: launched here and restarted as needed, or attached to where it already runs."""

import asyncio
import time
from dataclasses import replace
from enum import Enum, auto

from unirl.rollout.sglang.client import RequestRefusedError, ServerLostError, SGLangClient
from unirl.rollout.sglang.control import ServerControl, ServerInfo
from unirl.rollout.sglang.launch import ServerOptions
from unirl.rollout.sglang.process import ServerProcess

_POLL_S = 0.5


class ServerState(Enum):
    DOWN = auto()
    """Starting, or found dead: takes no samples."""
    UP = auto()
    FAILED = auto()
    """Will not come back."""


class Server:
    """A server that samples can be sent to while it is UP.

    name: given by the fleet, for people to say which one they mean.
    state: see `ServerState`; in_flight: samples that it has.
    restarts: since weights last reached it; lives: starts so far.
    weight_version: of the weights that it was given last; None before the first.
    lock: held while it is revived and while its weights change, so that neither meets the other.
    suspected: set by whoever finds it silent or gone, for the supervisor to look at.
    """

    def __init__(self, source: ServerOptions | str, *, api_key: str | None = None):
        """source: how to launch it, or the URL of one that runs; `api_key` is the key of the latter."""
        self._source = source
        self._api_key = api_key
        self._process: ServerProcess | None = None
        self._control: ServerControl | None = None
        self.name = ""
        self.info: ServerInfo | None = None
        self.state = ServerState.DOWN
        self.failure = ""
        self.in_flight = 0
        self.restarts = 0
        self.lives = 0
        self.weight_version: int | None = None
        self.lock = asyncio.Lock()
        self.suspected = asyncio.Event()
        self.last_heard = 0.0

    @property
    def control(self) -> ServerControl:
        """Of its present life. Raises ServerLostError where it has none."""
        if self._control is None:
            raise ServerLostError(f"{self}: not running")
        return self._control

    @property
    def is_launched_here(self) -> bool:
        return isinstance(self._source, ServerOptions)

    @property
    def pid(self) -> int | None:
        """Head of its process tree where it was launched here."""
        return self._process.pid if self._process else None

    @property
    def gpus(self) -> tuple[int, ...]:
        """Devices of this machine that it was launched on; none where that is not known."""
        return self._source.gpus if self.is_launched_here else ()

    @property
    def endpoint(self) -> tuple[str, str | None]:
        """URL and API key."""
        return (self._process.url, self._process.api_key) if self._process else (self._source, self._api_key)

    @property
    def is_attached(self) -> bool:
        """Whether it was started by somebody else, who looks after its process."""
        return isinstance(self._source, str)

    @property
    def address(self) -> str | None:
        """Its URL; None while one that is launched here has no process."""
        url = self.endpoint[0]
        return url if isinstance(url, str) else None

    def __str__(self) -> str:
        return f"server {self._process.url if self._process else self._source}"

    def heard(self) -> None:
        """Note that it has just answered."""
        self.last_heard = time.monotonic()

    async def start(self, limit_s: float) -> None:
        """Launch or attach and wait until it answers. Raises ServerLostError, with the end of its log."""
        if self.is_launched_here:
            self._process = await asyncio.to_thread(ServerProcess, self._source)
        self._control = ServerControl(SGLangClient(*self.endpoint))
        try:
            await self._wait_ready(limit_s)
            self.info = await self._control.info()
        except RequestRefusedError as error:
            raise ServerLostError(f"{self} does not take our requests: {error}") from error
        self.lives += 1
        self.heard()

    async def _wait_ready(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return await self._control.health(max(_POLL_S, deadline - time.monotonic()))
            except ServerLostError as error:
                self.check_process()
                if time.monotonic() > deadline:
                    raise ServerLostError(f"not ready after {limit_s:g} s: {error}{self.log_tail()}") from error
            await asyncio.sleep(_POLL_S)

    def check_process(self) -> None:
        """Raises ServerLostError, with the end of its log, where its process has ended."""
        if self._process is not None and not self._process.is_running():
            raise ServerLostError(f"{self}: its process has ended{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of its log as further lines of a message; nothing where it was not launched here."""
        return f"; {self._process.log_tail()}" if self._process else ""

    async def stop(self) -> None:
        """End its present life: connections are broken off, its processes killed and gone. May be called twice."""
        self.state = ServerState.FAILED if self.state is ServerState.FAILED else ServerState.DOWN
        control, self._control = self._control, None
        if control is not None:
            await control.client.close()
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(process.kill)


def per_server(options: ServerOptions, count: int) -> list[ServerOptions]:
    """`count` servers that differ in their logs and, on CUDA, in their devices: `tp` of them each, in order."""
    result = []
    for number in range(count):
        gpus = options.gpus[number * options.tp : (number + 1) * options.tp]
        log_path = options.log_path.with_name(f"{options.log_path.stem}_{number}{options.log_path.suffix}")
        result.append(replace(options, gpus=gpus, log_path=log_path))
    return result
