"""The parent's end of a scorer process."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import Connection
from typing import Any

from unirl.errors import UserError

START_LIMIT_S = 120.0

_living: "weakref.WeakSet[WorkerProcess]" = weakref.WeakSet()


class WorkerDiedError(Exception):
    """The scorer process is gone, or does not take its work."""


class WorkerProcess:
    """A scorer process that can be killed at any moment and does not outlive its parent.

    It is an interpreter of its own, neither a fork (of a process that holds torch) nor multiprocessing's spawn (which
    runs the parent's main module again): it imports the scorer and nothing else. It leads a process group of its own,
    so Ctrl-C in the terminal does not reach it, and a kill takes its children along.
    """

    def __init__(self, scorer: str, send_limit_s: float):
        ours, theirs = socket.socketpair()
        lifeline, their_lifeline = socket.socketpair()
        # A worker that is stopped does not empty its socket: without a limit, a send would wait for it for ever.
        limit = struct.pack("ll", int(send_limit_s), int(send_limit_s % 1 * 1e6) or 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with theirs, their_lifeline:
            fds = theirs.fileno(), their_lifeline.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "unirl.reward.worker", scorer, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,
            )
        self.scorer = scorer
        self._parent = os.getpid()
        self.connection = Connection(ours.detach())
        self._lifeline = lifeline
        self.start_deadline = time.monotonic() + START_LIMIT_S
        _living.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> str | None:
        """Wait until the scorer is imported and return its `answer_field`.

        Raises UserError where the scorer cannot be loaded, WorkerDiedError where the process ends or takes too long.
        """
        if not self.connection.poll(max(0.0, self.start_deadline - time.monotonic())):
            raise WorkerDiedError(f"not imported after {START_LIMIT_S:g} s")
        kind, value = self.receive()
        if kind == "refused":
            raise UserError(value)
        return value

    def send(self, chunk: list[tuple[str, Any]]) -> None:
        """Hand out a chunk. Raises WorkerDiedError."""
        try:
            self.connection.send(chunk)
        except OSError as error:
            raise WorkerDiedError(f"scorer process {self.pid} took no work: {error}") from error

    def receive(self) -> tuple[Any, ...]:
        """The next message; waits for it. Raises WorkerDiedError."""
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(f"scorer process {self.pid} ended{self._exit_status()}") from error

    def _exit_status(self) -> str:
        """Its connection closes a moment before it can be waited for."""
        try:
            return f" with exit code {self._process.wait(timeout=1)}"
        except subprocess.TimeoutExpired:
            return ""

    def kill(self) -> None:
        """End the process and its children at once; in a fork of the parent, only let go of them."""
        if os.getpid() != self._parent:
            self.close_ends()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.close_ends()
        self._process.wait()

    def close_ends(self) -> None:
        self.connection.close()
        self._lifeline.close()


def _close_ends_in_fork() -> None:
    """A forked child of the parent must not keep the lifelines open."""
    for worker in list(_living):
        worker.close_ends()


os.register_at_fork(after_in_child=_close_ends_in_fork)
