"""One server over its lives: launched and restarted as needed, or attached to where it already runs."""

import asyncio
import time
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

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


class RunningServer(Protocol):
    """The processes of a server, as `ServerProcess` has them on this machine; they may be on another one.

    gpus: devices of this machine that it was launched on; none on another.
    """

    url: str
    api_key: str
    gpus: tuple[int, ...]

    @property
    def pid(self) -> int:
        """Head of its process tree."""

    def is_running(self) -> bool:
        """Known at once."""

    def log_tail(self) -> str:
        """The last lines of its log. May take a few seconds."""

    def kill(self) -> None:
        """End it; returns when it is gone. May be called twice."""


class Launcher(Protocol):
    """Starts the processes of a server, anew for each of its lives."""

    def launch(self) -> RunningServer:
        """Raises ServerLostError where there is no machine to start it on."""


@dataclass(frozen=True)
class LocalLauncher:
    """Starts them on this machine."""

    options: ServerOptions

    def launch(self) -> RunningServer:
        """See `Launcher.launch`."""
        return ServerProcess(self.options)

    def __str__(self) -> str:
        return f"of {self.options.log_path}"


Source = ServerOptions | Launcher | str
"""How a server is launched, on this machine or by way of a launcher; or the URL of one that runs."""


class Server:
    """A server that samples can be sent to while it is UP.

    name: given by the fleet, for people to say which one they mean.
    state: see `ServerState`; in_flight: samples that it has.
    restarts: since weights last reached it; lives: starts so far.
    weight_version: of the weights that it was given last; None before the first.
    lock: held while it is revived and while its weights change, so that neither meets the other.
    suspected: set by whoever finds it silent or gone, for the supervisor to look at.
    """

    def __init__(self, source: Source, *, api_key: str | None = None):
        """`api_key` is the key of one that runs already."""
        self._source = LocalLauncher(source) if isinstance(source, ServerOptions) else source
        self._api_key = api_key
        self._process: RunningServer | None = None
        self._last_url: str | None = None
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
    def pid(self) -> int | None:
        """Head of its process tree where it was launched."""
        return self._process.pid if self._process else None

    @property
    def gpus(self) -> tuple[int, ...]:
        """Devices of this machine that it was launched on; none where that is not known."""
        return self._process.gpus if self._process else ()

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
        return f"server {self._last_url or self._source}"

    def heard(self) -> None:
        """Note that it has just answered."""
        self.last_heard = time.monotonic()

    async def start(self, limit_s: float) -> None:
        """Launch or attach and wait until it answers. Raises ServerLostError, with the end of its log."""
        if not isinstance(self._source, str):
            self._process = await asyncio.to_thread(self._source.launch)
            self._last_url = self._process.url
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
                await self.check_process()
                if time.monotonic() > deadline:
                    raise ServerLostError(f"not ready after {limit_s:g} s: {error}{await self.log_tail()}") from error
            await asyncio.sleep(_POLL_S)

    async def check_process(self) -> None:
        """Raises ServerLostError, with the end of its log, where its process has ended."""
        if self._process is not None and not self._process.is_running():
            raise ServerLostError(f"{self}: its process has ended{await self.log_tail()}")

    async def log_tail(self) -> str:
        """The end of its log as further lines of a message; nothing where it was not launched."""
        return f"; {await asyncio.to_thread(self._process.log_tail)}" if self._process else ""

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
