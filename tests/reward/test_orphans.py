"""No scorer process outlives the process that started it, however that ends."""

import os
import signal
import subprocess
import sys

import pytest

from tests.reward.test_service import is_running, wait_until

PARENT = """
import os, sys, threading, time
from unirl.reward import RewardService

reward = RewardService("tests.reward.custom_scorers.ActingScorer", num_workers=3, timeout_s=60)
paths = [sys.argv[1] + "1", sys.argv[1] + "2"]
records = [{"path": path} for path in paths]
threading.Thread(target=reward.score, args=(["sleep 60"] * 2, records), daemon=True).start()
while not all(map(os.path.exists, paths)):
    time.sleep(0.01)
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
    os._exit(0)
if sys.argv[2] == "closing_fork":
    if os.fork() == 0:
        reward.close()
        os._exit(0)
    os.wait()
print(*reward.worker_pids, flush=True)
if sys.argv[2] == "exit":
    sys.exit()
if sys.argv[2] == "raise":
    raise ValueError("on the way out")
time.sleep(60)
"""


@pytest.fixture
def start_parent(tmp_path):
    """Start a process that holds a service, two workers busy and one idle; gives the process and their ids."""
    processes = []

    def start(mode: str):
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(tmp_path / "busy"), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        processes.append(process)
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        return process, pids

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("mode", ["exit", "raise"])
def test_when_the_parent_ends(start_parent, mode):
    process, pids = start_parent(mode)
    process.wait(timeout=30)
    wait_until(lambda: not any(map(is_running, pids)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_the_parent_is_killed(start_parent, number):
    process, pids = start_parent("wait")
    os.kill(process.pid, number)
    wait_until(lambda: not any(map(is_running, pids)))


def test_when_the_parent_is_killed_and_its_busy_workers_are_stopped(start_parent, tmp_path):
    process, pids = start_parent("wait")
    for name in ("busy1", "busy2"):
        wait_until((tmp_path / name).read_text)
        os.kill(int((tmp_path / name).read_text()), signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)))


def test_when_ctrl_c_comes_from_a_terminal(start_parent):
    process, pids = start_parent("wait")
    os.killpg(process.pid, signal.SIGINT)
    process.wait(timeout=30)
    wait_until(lambda: not any(map(is_running, pids)))


def test_when_a_fork_of_the_parent_lives_on(start_parent):
    process, pids = start_parent("fork")
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, pids)))
    os.killpg(process.pid, signal.SIGKILL)  # The fork.


def test_a_fork_of_the_parent_that_closes_the_service_ends_no_worker(start_parent):
    _, pids = start_parent("closing_fork")
    assert all(map(is_running, pids))
