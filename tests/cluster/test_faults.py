"""The training command on Ray, when its disk is full, it is stopped early, or its cluster goes."""

import importlib.util
import os
import secrets
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import TWO_RANKS, policy_bytes, read_until
from tests.trainer.conftest import ENVIRONMENT, wait_for_lines

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)


def start(arguments: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**ENVIRONMENT, **environment},
    )


@pytest.fixture
def short_folder():
    """Of a short name, as Ray's sockets want."""
    folder = Path(tempfile.mkdtemp(prefix="uf-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def full_disk(tmp_path):
    """A run directory whose checkpoints are on a disk that is nearly full."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", checkpoints], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path / "run"
    subprocess.run(["umount", "-l", checkpoints], check=True)


@pytest.mark.timeout(580)
def test_a_full_disk_costs_the_save_alone(command, train, two_ranks, full_disk):
    def run() -> subprocess.CompletedProcess:
        return train(full_disk, *TWO_RANKS, "resume=auto")

    full = run()
    assert full.returncode == 2, full.stderr
    assert "checkpoint of iteration 2 could not be written" in full.stdout
    assert "training goes on" in full.stdout
    assert "checkpoint of iteration 6 could not be written" in full.stderr
    assert "No space left on device" in full.stderr
    assert "Traceback" not in full.stderr
    assert list((full_disk / "checkpoints").iterdir()) == []
    assert list(full_disk.glob("stall-*")) == [], "no rank was lost"

    subprocess.run(["mount", "-o", "remount,size=20m", full_disk / "checkpoints"], check=True)
    roomy = run()
    assert roomy.returncode == 0, roomy.stderr
    assert policy_bytes(full_disk) == policy_bytes(two_ranks)


@pytest.mark.timeout(300)
def test_secrets_are_nowhere_and_files_are_their_users_alone(command, tmp_path, short_folder):
    secret = f"hf_{secrets.token_hex(16)}"
    names = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"), secret)
    run_dir = tmp_path / "run"
    with start(command(run_dir, *TWO_RANKS), TMPDIR=str(short_folder), **names) as driver:
        told = read_until(driver, "rank 1: ")
        wait_for_lines(run_dir, 2, driver)
        os.kill(int(told.split("pid ")[1].split()[0]), signal.SIGKILL)  # for a stall report
        told += read_until(driver, "replacing and going on")
        wait_for_lines(run_dir, 4, driver)
        folder = next(short_folder.glob("unirl-ray-*"))
        ray_token = (folder / "token").read_text()
        logs = [path for path in folder.rglob("*") if path.is_file()]
        assert any("raylet" in path.name for path in logs)
        assert [path for path in logs if holds(path, secret)] == []
        assert [path for path in logs if path.name != "token" and holds(path, ray_token)] == []
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        driver.send_signal(signal.SIGTERM)
        told += driver.stdout.read()
    assert driver.returncode == 130, told
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert any(path.name.startswith("stall-") for path in files)
    assert [path for path in files if holds(path, secret) or holds(path, ray_token)] == []
    assert secret not in told
    assert ray_token not in told
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def holds(path: Path, secret: str) -> bool:
    return secret.encode() in path.read_bytes()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("number", "when"),
    [(signal.SIGTERM, "unirl-ray-*/ray/session_*"), (signal.SIGINT, "unirl-ray-*/token")],
    ids=["SIGTERM while ranks start", "Ctrl-C while Ray starts"],
)
def test_a_signal_while_the_run_starts_ends_it_and_all_it_has_started(command, tmp_path, short_folder, number, when):
    with start(command(tmp_path / "run", *TWO_RANKS), TMPDIR=str(short_folder)) as driver:
        deadline = time.monotonic() + 120
        while not list(short_folder.glob(when)):
            assert driver.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        children = psutil.Process(driver.pid).children(recursive=True)
        driver.send_signal(number)
        told = driver.stdout.read()
    assert driver.returncode == 130, told
    assert "stopped before the first iteration" in told
    assert "Traceback" not in told
    assert list(short_folder.glob("unirl-ray-*")) == []
    psutil.wait_procs(children, timeout=60)
    named = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [line for line in named if any(str(short_folder) in argument for argument in line)] == []
