"""Every algorithm preset trains the demo's task for two iterations, with the demo's recipe and real parts."""

import shutil
from pathlib import Path

import pytest

from tests.trainer.conftest import read_metrics
from unirl.config import compose, to_yaml
from unirl.demo.arith import make_base_model
from unirl.trainer.ar import ARTrainer

PRESETS = sorted(path.stem for path in Path("examples/algorithm").glob("*.yaml"))
SMALL = ["num_iterations=2", "batch_size=4", "data.size=64", "data.heldout_size=4", "sampling.max_new_tokens=12"]
# So small a base model is never right: a reward that varies from sample to sample makes every preset step.
SCORER = "reward.scorer=tests.trainer.scorers.CountLetters"
EPISODES = ["rollout.environment=tests.rollout.environments.Counter", "rollout.environment_args={turns: 2}"]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("base") / "model"
    make_base_model(str(path), careful_steps=10, lazy_steps=0)
    return str(path)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains_the_demo_task(preset, base_model, tmp_path):
    overrides = [f"algorithm={preset}", f"model.path={base_model}", f"run_dir={tmp_path}/run", *SMALL]
    if preset == "webrl_const_t10":  # whose rows are the steps of episodes
        config = compose("ar/calculator_multi_turn_tiny_cpu", [*overrides, *EPISODES])
    else:
        config = compose("ar/arith_drpo_tiny_cpu", [*overrides, SCORER])
    assert ARTrainer(config, to_yaml(config)).fit() == 0
    lines = read_metrics(tmp_path / "run")[1:]
    assert len(lines) == 2
    for line in lines:
        assert line["optimizer_steps"] == 1
        assert line["loss"] == pytest.approx(line["loss"], abs=100)
        assert line["grad_norm"] > 0
        assert line["rollout_replay_logp_absdiff_mean"] < 1e-5
    shutil.rmtree(tmp_path / "run")  # checkpoints of seventeen presets
