"""The guard: what it started ends with its parent; no SGLang needed."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from unirl.rollout.sglang import guard

# A child, a grandchild in a session of its own whose parent has gone, and one that ignores every polite signal.
STUBBORN = "trap '' TERM INT HUP; (setsid sleep 300 &) ; sleep 300 & echo started key-1; wait"


def start(tmp_path, command: str) -> tuple[subprocess.Popen, socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, guard.__file__, str(theirs.fileno()), str(tmp_path / "log"), "bash", "-c", command],
            pass_fds=[theirs.fileno()],
            env={**os.environ, guard.API_KEY_VARIABLE: "key-1"},
            start_new_session=True,
        )
    return process, ours


def family(process: subprocess.Popen, size: int) -> list[psutil.Process]:
    for _ in range(500):
        members = psutil.Process(process.pid).children(recursive=True)
        if len(members) >= size:
            return members
        time.sleep(0.02)
    raise AssertionError(f"found {members}")


def assert_gone(members: list[psutil.Process]) -> None:
    assert psutil.wait_procs(members, timeout=20)[1] == []


def test_all_descendants_end_when_the_lifeline_closes(tmp_path):
    process, lifeline = start(tmp_path, STUBBORN)
    members = family(process, 3)
    while not (tmp_path / "log").read_text():
        time.sleep(0.02)
    lifeline.close()
    assert process.wait(timeout=30) == 128 + signal.SIGKILL
    assert_gone(members)
    assert (tmp_path / "log").read_text() == "started ***\n"


def test_descendants_that_are_stopped_end_too(tmp_path):
    process, lifeline = start(tmp_path, STUBBORN)
    members = family(process, 3)
    for member in members:
        member.suspend()
    lifeline.close()
    process.wait(timeout=30)
    assert_gone(members)


def test_the_command_ends_when_the_guard_is_killed(tmp_path):
    process, lifeline = start(tmp_path, "exec sleep 300")
    members = family(process, 1)
    process.kill()
    process.wait()
    assert_gone(members)
    lifeline.close()


@pytest.mark.parametrize(
    ("command", "code"), [("exit 3", 3), ("kill -9 $$", 128 + 9), ("printf 'no newline key-1'", 0)]
)
def test_the_guard_ends_with_the_command(tmp_path, command, code):
    process, lifeline = start(tmp_path, f"(setsid sleep 300 &); {command}")
    assert process.wait(timeout=30) == code
    lifeline.close()
    assert (tmp_path / "log").read_text() == ("no newline ***" if code == 0 else "")
