"""The whole loop against an environment, in processes of its own."""

import json
import shutil

import pytest

from tests.trainer.conftest import read_metrics
from unirl.observe.metrics import timeless


@pytest.fixture(scope="module")
def train_episodes(train, recipe_dir, tmp_path_factory):
    """Runs the tiny recipe against an environment that raises now and then, one row per step."""
    folder = tmp_path_factory.mktemp("episodes") / "model"
    shutil.copytree(recipe_dir / "model", folder)
    # A random model hardly ever ends its turn: one token in four does here.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(0, 256, 4))}))

    def run(run_dir, *overrides):
        finished = train(
            run_dir,
            f"model.path={folder}",
            "rollout.environment=tests.rollout.environments.Fragile",
            "rollout.environment_args={turns: 4, fails_on: 6}",
            "rollout.max_turns=3",
            "rollout.max_episode_tokens=80",
            "algorithm.drpo_epsilon=1",
            "eval.every=2",
            *overrides,
        )
        assert finished.returncode == 0, finished.stderr
        return read_metrics(run_dir), finished

    return run


STEPS = ("rollout.rows=step", "algorithm.step_adv_const_length=1")


@pytest.fixture(scope="module")
def by_step(train_episodes, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("by_step") / "run"
    return run_dir, *train_episodes(run_dir, *STEPS, "num_iterations=4")


def test_metrics_of_episodes(by_step):
    _, lines, finished = by_step
    for line in lines[1:]:
        assert 1 < line["episode/turns_mean"] < line["episode/turns_max"] == 3
        assert line["episode/length_mean"] > line["response/length_mean"]
        assert 0 < line["response/aborted_fraction"] < 1
        assert line["reward/ungraded"] == line["response/aborted_fraction"] * 16
        assert line["rollout_replay_logp_absdiff_mean"] < 1e-5, "the actor sees every turn as the engine did"
        assert line["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert "episodes were aborted and are left out of training: RuntimeError: bad length" in finished.stderr
    assert "eval/letters/avg@2" in lines[2]


def test_samples_are_readable_turn_by_turn(by_step):
    samples = [json.loads(line) for line in (by_step[0] / "samples.jsonl").read_text().splitlines()]
    episode = max(samples, key=lambda sample: len(sample["turns"]))
    assert len(episode["turns"]) > 1
    assert episode["prompt"].endswith("<|assistant|>")
    assert episode["turns"][0]["observation"].endswith(" letters<|end|><|assistant|>")
    assert episode["turns"][-1]["observation"] == ""
    if episode["reward"] is not None:
        assert sum(turn["reward"] for turn in episode["turns"]) == pytest.approx(episode["reward"])


def test_a_resumed_run_has_the_same_numbers(by_step, train_episodes, tmp_path):
    train_episodes(tmp_path / "run", *STEPS, "num_iterations=2")
    resumed, _ = train_episodes(tmp_path / "run", *STEPS, "num_iterations=4", "resume=auto")
    assert timeless(resumed) == timeless(by_step[1])


def test_both_packings_have_one_gradient_where_the_loss_is_of_tokens(by_step, train_episodes, tmp_path):
    episode, _ = train_episodes(tmp_path / "run", "num_iterations=1")
    step = by_step[1]
    for name in ("loss", "grad_norm", "entropy", "reward/mean"):
        assert episode[1][name] == pytest.approx(step[1][name], rel=1e-4), name
