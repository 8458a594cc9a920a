"""A run with all the models there are, actor, critic and reference, on two ranks that do not stay the same ones."""

import importlib.util
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.test_run import read_until
from tests.trainer.conftest import ENVIRONMENT, command, read_metrics, recipe_dir, train, wait_for_lines  # noqa: F401

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

METRICS = ("loss", "value_loss", "ref_kl", "values/mean", "grad_norm", "critic/grad_norm")


@pytest.fixture
def all_models(recipe_dir) -> tuple[str, ...]:  # noqa: F811
    return (
        "+algorithm=ppo",
        "algorithm.loss=ppo",  # the recipe's own key has precedence over a preset's
        "algorithm.critic.optimizer.lr=1e-2",
        "algorithm.gae.bootstrap_truncated=false",  # every sample of this policy is truncated
        "algorithm.kl_coef=0.04",
        f"model.reference_path={recipe_dir}/model",
        "num_iterations=5",
        "eval.every=0",
    )


@pytest.mark.timeout(580)
def test_two_ranks_train_as_one_process_and_outlive_one(all_models, train, command, tmp_path):  # noqa: F811
    alone, together = tmp_path / "alone", tmp_path / "together"
    finished = train(alone, *all_models)
    assert finished.returncode == 0, finished.stderr

    two_ranks = ("num_devices=2", "cluster.object_store_gb=0.2", "cluster.heartbeat_s=10")
    arguments = command(together, *all_models, *two_ranks)
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    ) as driver:
        told = read_until(driver, "rank 1: ")
        wait_for_lines(together, 2, driver)
        os.kill(int(re.search(r"pid (\d+)", told)[1]), signal.SIGKILL)
        rest = driver.stdout.read()
    assert driver.returncode == 0, rest
    assert "replacing and going on" in rest
    assert_same_numbers(together, alone)


def assert_same_numbers(found: Path, expected: Path) -> None:
    for ours, theirs in zip(read_metrics(found), read_metrics(expected), strict=True):
        assert ours.keys() == theirs.keys()
        assert ours.get("reward/mean") == theirs.get("reward/mean")
        for name in METRICS:
            assert name in theirs or theirs["iteration"] == 0
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-4, abs=1e-6)
