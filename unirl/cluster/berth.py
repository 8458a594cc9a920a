"""Places for servers on the devices of a run, as who launches servers there sees them."""

from collections.abc import Callable
from typing import Protocol

from unirl.errors import UserError


class HostLostError(UserError):
    """The process that hosts a server is gone, or cannot be had."""


class Hosted(Protocol):
    """A process and all that it has started. url, api_key: where it answers, and what it asks for; pid: its head.

    gpus: devices of this machine that it has; none on another machine.
    """

    url: str
    api_key: str
    gpus: tuple[int, ...]

    @property
    def pid(self) -> int: ...

    def is_running(self) -> bool:
        """Known at once."""

    def log_tail(self) -> str:
        """The end of its log. May take a few seconds."""

    def kill(self) -> None:
        """End it; returns when it is gone. May be called twice."""


MakeProcess = Callable[[str, tuple[int, ...]], Hosted]
"""Starts a process that listens on an address, with devices of its machine; importable by name, and pickled."""


class Berth(Protocol):
    """A place for one server at a time: a node, and devices of it."""

    def launch(self, make: MakeProcess) -> Hosted:
        """Start a process there; on another node where that one is lost.

        Raises HostLostError where there is no node with free devices, or it is lost meanwhile; what `make` raises.
        """
