"""PPO with a critic through the whole loop, by its preset."""

import shutil
from pathlib import Path

import pytest

from tests.trainer.conftest import read_metrics
from unirl.observe.metrics import timeless

PPO = (
    "+algorithm=ppo",
    "algorithm.loss=ppo",  # the recipe's own key has precedence over a preset's
    "algorithm.critic.optimizer.lr=1e-2",
    "algorithm.gae.bootstrap_truncated=false",  # every sample of this policy is truncated
    "algorithm.critic.warmup_iterations=2",
    "stack.num_updates_per_batch=2",
    "eval.every=0",
    "checkpoint.every=15",
)

ITERATIONS = 18


@pytest.fixture(scope="module")
def ppo_run(train, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("ppo") / "run"
    finished = train(run_dir, *PPO, f"num_iterations={ITERATIONS}")
    assert finished.returncode == 0, finished.stderr
    return run_dir


def test_policy_and_critic_learn(ppo_run):
    lines = read_metrics(ppo_run)[1:]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert lines[-1]["values/mean"] == pytest.approx(lines[-1]["returns/mean"], abs=0.15)
    assert lines[-1]["value_loss"] < lines[0]["value_loss"] / 2


def test_the_critic_warms_up_alone(ppo_run):
    for line in read_metrics(ppo_run)[1:]:
        is_warm_up = line["iteration"] <= 2
        assert line["critic/optimizer_steps"] == 2
        assert line["optimizer_steps"] == (0 if is_warm_up else 2)
        assert ("loss" in line) == (not is_warm_up)
        assert line["weight_version"] == line["iteration"] - 1


def test_resume_gives_the_same_numbers(ppo_run, train, tmp_path):
    run_dir = shutil.copytree(ppo_run, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / f"iteration_{ITERATIONS:08d}")
    assert sorted(entry.name for entry in (checkpoints / "iteration_00000015").iterdir() if entry.is_dir()) == [
        "actor",
        "critic",
    ]
    resumed = train(run_dir, *PPO, f"num_iterations={ITERATIONS}", "resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed after iteration 15" in resumed.stdout
    assert timeless(read_metrics(run_dir)) == timeless(read_metrics(ppo_run))
