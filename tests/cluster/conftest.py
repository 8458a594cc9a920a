"""Runs of the training command with two ranks on Ray."""

import subprocess
import time
from pathlib import Path

import pytest

from tests.trainer.conftest import command, recipe_dir, train  # noqa: F401 - fixtures

RAY = ("num_devices=2", "cluster.object_store_gb=0.2", "cluster.heartbeat_s=10")
TWO_RANKS = (*RAY, "parallel.tp=2")


@pytest.fixture(scope="session")
def two_ranks(train, tmp_path_factory) -> Path:  # noqa: F811
    """The run directory of six iterations that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("two") / "run"
    finished = train(run_dir, *TWO_RANKS)
    assert finished.returncode == 0, finished.stderr
    return run_dir


def policy_bytes(run_dir: Path) -> bytes:
    return (run_dir / "policy" / "model.safetensors").read_bytes()


def read_until(driver: subprocess.Popen, text: str) -> str:
    """The first line of the driver's output with the text."""
    deadline = time.monotonic() + 120
    for line in driver.stdout:
        if text in line:
            return line
        assert time.monotonic() < deadline
    raise AssertionError(f"the driver ended before {text!r}")
