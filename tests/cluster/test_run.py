"""The training command with two ranks on Ray: what it learns, and what it survives."""

import importlib.util
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.cluster.conftest import RAY, TWO_RANKS, policy_bytes, read_until
from tests.trainer.conftest import (  # noqa: F401 - fixtures
    ENVIRONMENT,
    REPLAY,
    command,
    read_metrics,
    recipe_dir,
    train,
    undisturbed,
    wait_for_lines,
)
from unirl.observe.metrics import timeless

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

PIPELINE = (*RAY, "parallel.pp=2")


def assert_learns_the_same(run_dir: Path, undisturbed: Path) -> None:  # noqa: F811
    for found, expected in zip(read_metrics(run_dir), read_metrics(undisturbed), strict=True):
        assert found.get("reward/mean") == expected.get("reward/mean")
        assert found.keys() == expected.keys()
        for name in ("loss", "grad_norm", "entropy"):
            assert found.get(name, 0) == pytest.approx(expected.get(name, 0), rel=1e-4, abs=1e-6)


def test_two_ranks_learn_what_one_learns(two_ranks, undisturbed):  # noqa: F811
    assert_learns_the_same(two_ranks, undisturbed)


def test_ranks_replay_the_support_that_was_sampled(train, tmp_path):  # noqa: F811
    finished = train(tmp_path / "run", *TWO_RANKS, *REPLAY, "num_iterations=1", "eval.every=0")
    assert finished.returncode == 0, finished.stderr
    assert read_metrics(tmp_path / "run")[-1]["rollout_replay_logp_absdiff_max"] < 1e-5


def test_another_layout_goes_on_where_one_stopped(train, undisturbed, tmp_path):  # noqa: F811
    for layout in (["num_iterations=3", *PIPELINE], ["resume=auto"]):  # pipeline stages, then one process
        finished = train(tmp_path / "run", *layout)
        assert finished.returncode == 0, finished.stderr
    assert_learns_the_same(tmp_path / "run", undisturbed)


@pytest.mark.timeout(580)
def test_the_run_outlives_a_rank_and_goes_on_after_its_driver(two_ranks, command, train, tmp_path):  # noqa: F811
    run_dir = tmp_path / "run"
    with subprocess.Popen(
        command(run_dir, *TWO_RANKS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as driver:
        told = read_until(driver, "rank 1: ")
        os.kill(int(re.search(r"pid (\d+)", told)[1]), signal.SIGKILL)
        assert "replacing and going on" in read_until(driver, "rank 1 (pid")
        wait_for_lines(run_dir, 3, driver)
        children = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
    psutil.wait_procs(children, timeout=120)  # Ray's agents look after their raylet now and then
    assert [process.name() for process in children if process.is_running()] == []

    finished = train(run_dir, *TWO_RANKS, "resume=auto")
    assert finished.returncode == 0, finished.stderr
    assert timeless(read_metrics(run_dir)) == timeless(read_metrics(two_ranks))
    assert policy_bytes(run_dir) == policy_bytes(two_ranks)
