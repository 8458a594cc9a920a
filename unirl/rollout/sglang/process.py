"""The process of a server: its start, its log, and an end that leaves nothing behind."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from dataclasses import replace
from pathlib import Path

import psutil

from unirl.rollout.sglang import guard
from unirl.rollout.sglang.launch import ServerOptions, command_line, environment

_KILL_LIMIT_S = guard.KILL_LIMIT_S + 5
_LOG_LINES = 30

_living: "weakref.WeakSet[ServerProcess]" = weakref.WeakSet()


class ServerProcess:
    """A server and its guard, in a session of their own; both end with this process, even if that is killed.

    url, api_key: where it answers once it is ready, and the key that it asks for, new for every process. gpus: as of
    the options.
    """

    def __init__(self, options: ServerOptions):
        port = _free_port(options.host)
        self.url = f"http://{options.host}:{port}"
        self.gpus = options.gpus
        self.api_key = secrets.token_hex(32)  # SGLang makes an argument of it, which must not begin with a dash
        self._log_path = options.log_path
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._parent = os.getpid()
        self._private = tempfile.TemporaryDirectory(prefix="unirl-sglang-")  # mode 0700
        key_file = Path(self._private.name) / "key.yaml"
        key_file.write_text(f"api-key: {self.api_key}\n")
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", guard.__file__, str(theirs.fileno()), str(self._log_path)),
                    *command_line(options, port, key_file),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**environment(options), guard.API_KEY_VARIABLE: self.api_key},
                start_new_session=True,
            )
        _living.add(self)

    @property
    def pid(self) -> int:
        """Of the guard, the head of the process tree."""
        return self._process.pid

    def is_running(self) -> bool:
        return self._process.poll() is None

    def log_tail(self) -> str:
        """The last lines of the server's log, and where the rest is."""
        with open(self._log_path, "rb") as log:
            log.seek(self._log_start)
            lines = deque((line.decode(errors="replace").rstrip() for line in log), maxlen=_LOG_LINES)
        return "\n".join([f"the end of {self._log_path}:", *(f"  | {line}" for line in lines)])

    def kill(self) -> None:
        """End server and guard with all they started; returns when they are gone. May be called twice.

        In a fork of the process that started it, only let go of it.
        """
        if os.getpid() != self._parent:
            self._lifeline.close()
            return
        family = _family(self.pid) if self.is_running() else []
        self._lifeline.close()  # the guard's sign
        for process in family:  # not left to the guard, which may be stopped
            if process.pid != self.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        try:
            self._process.wait(_KILL_LIMIT_S / 5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(_KILL_LIMIT_S)
        psutil.wait_procs(family, timeout=_KILL_LIMIT_S)
        self._private.cleanup()


def _family(pid: int) -> list[psutil.Process]:
    try:
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def start_on_node(options: ServerOptions, host: str, devices: tuple[int, ...]) -> ServerProcess:
    """Start a server on the machine of this process: it listens on `host` and, on CUDA, has `devices`."""
    return ServerProcess(replace(options, host=host, gpus=devices if options.device == "cuda" else ()))


def _free_port(host: str) -> int:
    """A port that was free a moment ago: a server that finds it taken ends, and its restart takes another."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _let_go_in_fork() -> None:
    """A forked child of the trainer must not keep the lifelines open."""
    for process in list(_living):
        process._lifeline.close()


os.register_at_fork(after_in_child=_let_go_in_fork)
