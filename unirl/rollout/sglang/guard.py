"""Runs a command such that it, and everything it starts, ends when its parent does, however that happens.

Run as a script of its own, so that it starts in a moment:

    python guard.py LIFELINE_FD LOG_PATH COMMAND...

The parent holds the other end of the lifeline, a socket. When that closes (the parent closed it, crashed, or was
killed) every descendant is killed: the guard is their subreaper, so that none can leave its family. The command's
output goes to LOG_PATH, with the value of UNIRL_SGLANG_API_KEY struck out. Should the guard itself be killed, the
command dies with it.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time

import psutil

API_KEY_VARIABLE = "UNIRL_SGLANG_API_KEY"
KILL_LIMIT_S = 20.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(lifeline_fd: int, log_path: str, command: list[str]) -> int:
    """Run `command`; returns its exit code, 128 + the signal's number where one ended it."""
    lifeline, guard_pid = socket.socket(fileno=lifeline_fd), os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)

    def die_with_guard() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:  # it ended before it could be bound
            os._exit(1)

    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(log_path, "ab", buffering=0) as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_guard,
        )
        try:
            _pump(child, lifeline, _Redacted(log, os.environ.get(API_KEY_VARIABLE, "")))
        finally:
            child.kill()
            code = child.wait(KILL_LIMIT_S)  # first: psutil would take its exit code
            kill_family()
    return code if code >= 0 else 128 - code


def _pump(child: subprocess.Popen, lifeline: socket.socket, log: "_Redacted") -> None:
    """Copy the child's output until the lifeline closes or the child ends."""
    output, ended = child.stdout.fileno(), os.pidfd_open(child.pid)
    sources = [output, ended, lifeline.fileno()]
    while True:
        ready = select.select(sources, [], [])[0]
        if output in ready:
            data = os.read(output, 1 << 16)
            log.write(data)
            if not data:
                sources.remove(output)
        elif ended in ready or lifeline.fileno() in ready:
            break
    log.close()


class _Redacted:
    """Writes whole lines, without the secret."""

    def __init__(self, file, secret: str):
        self._file, self._secret, self._rest = file, secret.encode(), b""

    def write(self, data: bytes) -> None:
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        self._put(lines + newline)

    def close(self) -> None:
        self._put(self._rest)

    def _put(self, text: bytes) -> None:
        self._file.write(text.replace(self._secret, b"***") if self._secret else text)


def kill_family() -> None:
    """Kill all descendants of this process and wait for their end, at most KILL_LIMIT_S."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while (family := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
