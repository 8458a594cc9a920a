"""The loop with a reference policy, and with presets that need more than the rollout's log-probs; in this process."""

import pytest

from tests.trainer.conftest import REPLAY, read_metrics
from unirl.observe.metrics import timeless
from unirl.train_ar import main

TERMS = [
    "algorithm.loss=ppo",
    "algorithm.use_decoupled_loss=true",
    "algorithm.kl_coef=0.1",
    "algorithm.kl_ctl=0.05",
    "stack.num_updates_per_batch=2",
    "eval.path=null",
]


@pytest.fixture(scope="module")
def run(recipe_dir):
    def run_here(run_dir, *overrides):
        assert main([f"--config-dir={recipe_dir}", "--config-name=tiny", f"run_dir={run_dir}", *overrides]) == 0
        return read_metrics(run_dir)

    return run_here


@pytest.fixture(scope="module")
def with_reference(run, recipe_dir, tmp_path_factory):
    """Metrics of four iterations that keep close to the start policy."""
    run_dir = tmp_path_factory.mktemp("terms") / "run"
    return run(run_dir, *TERMS, f"model.reference_path={recipe_dir}/model", "num_iterations=4")


def test_the_kl_to_the_start_policy_starts_at_zero_and_grows(with_reference):
    first, *later = with_reference
    assert first["iteration"] == 1
    assert first["ref_kl"] < later[0]["ref_kl"], "its second update is already one step away"
    assert first["final_reward/mean"] == pytest.approx(first["reward/mean"], abs=1e-6), "the rollout was the reference"
    assert all(line["ref_kl"] > 1e-5 and line["final_reward/mean"] < line["reward/mean"] for line in later)


def test_losses_and_advantages_are_told_apart(with_reference):
    for line in with_reference:
        assert line["loss"] > line["actor_loss"], "the KL term"
        assert line["rollout_replay_logp_absdiff_mean"] < 1e-5
        assert abs(line["advantages/mean"]) < 1
        assert {"approx_kl_abs", "behave_approx_kl_abs", "behave_cap_ratio", "clip_ratio"} <= line.keys()


def test_all_policies_replay_the_support_that_was_sampled(run, recipe_dir, tmp_path):
    """Rollout, proximal and reference policy are one at first, and agree; without the support they would not."""
    reference = f"model.reference_path={recipe_dir}/model"
    overrides = [*TERMS, *REPLAY, reference, "num_iterations=2", "stack.num_updates_per_batch=1"]
    first, second = run(tmp_path / "run", *overrides)
    assert abs(first["ref_kl"]) < 1e-6
    assert second["ref_kl"] > 1e-5
    assert first["final_reward/mean"] == pytest.approx(first["reward/mean"], abs=1e-6)
    for line in (first, second):
        assert line["rollout_replay_logp_absdiff_max"] < 1e-5
        assert line["behave_approx_kl_abs"] < 1e-5
        assert line["entropy"] < 3.0, "of 20 tokens at most, log 20 = 3.0; of the whole vocabulary it is 5.5"


def test_resume_with_a_reference_gives_the_same_numbers(with_reference, run, recipe_dir, tmp_path):
    reference = f"model.reference_path={recipe_dir}/model"
    run(tmp_path / "run", *TERMS, reference, "num_iterations=2")
    resumed = run(tmp_path / "run", *TERMS, reference, "num_iterations=4", "resume=auto")
    assert timeless(resumed) == timeless(with_reference)


def test_a_reference_without_a_weight_is_only_reported(run, recipe_dir, tmp_path):
    plain = run(tmp_path / "plain", "num_iterations=2", "eval.path=null")
    reported = run(tmp_path / "run", "num_iterations=2", "eval.path=null", f"model.reference_path={recipe_dir}/model")
    assert [line.pop("ref_kl") > 0 for line in reported][1:] == [True]
    assert timeless(reported) == timeless(plain)


@pytest.mark.parametrize("preset", ["icepop", "kpop", "raft_pp"])
def test_a_preset_trains(run, tmp_path, preset):
    (tmp_path / "configs").mkdir()
    lines = run(tmp_path / "run", f"+algorithm={preset}", "num_iterations=2", "eval.path=null")
    for line in lines:
        assert line["optimizer_steps"] == 1
        assert line["grad_norm"] > 0
    if preset == "raft_pp":
        assert all(line["advantages/mean"] > 0 for line in lines)
    else:
        assert all(line["behave_cap_ratio"] == 0 and line["behave_approx_kl_abs"] < 1e-5 for line in lines)
