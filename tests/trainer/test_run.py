"""The whole loop: real model, engine, scorer processes and optimizer, in processes of their own."""

import json
import os
import resource
import shutil
import signal
import subprocess
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.conftest import ENVIRONMENT, read_metrics, wait_for_lines
from unirl.observe.metrics import timeless

METRICS = (
    "reward/mean reward/zero_variance_groups response/length_mean response/truncated_fraction ratio_mean ratio_max "
    "approx_kl drpo_penalty_mean clipfrac_upper clipfrac_lower rollout_replay_logp_absdiff_mean loss entropy grad_norm "
    "lr weight_version time/rollout time/reward time/train time/sync time/iteration tokens_per_second"
)


def test_metrics_of_every_iteration(undisturbed):
    lines = read_metrics(undisturbed)
    assert [line["iteration"] for line in lines] == list(range(7))
    assert "eval/letters/avg@2" in lines[0]
    assert "loss" not in lines[0]
    for line in lines[1:]:
        assert [name for name in METRICS.split() if name not in line] == []
        assert line["weight_version"] == line["iteration"] - 1
        assert line["rollout_replay_logp_absdiff_mean"] < 1e-5
        assert line["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert line["optimizer_steps"] == 1
    assert [line["iteration"] for line in lines if "eval/letters/pass@2" in line] == [0, 3, 6]


def test_the_run_directory_holds_config_samples_checkpoints_and_policy(undisturbed, recipe_dir):
    assert f"path: {recipe_dir}/model" in (undisturbed / "config.yaml").read_text()
    samples = [json.loads(line) for line in (undisturbed / "samples.jsonl").read_text().splitlines()]
    assert samples[-1]["prompt"].startswith("<s><|user|>count")
    assert samples[-1]["status"] in ("completed", "truncated")
    assert sorted(p.name for p in (undisturbed / "checkpoints").iterdir()) == [
        "iteration_00000004",
        "iteration_00000006",
    ]
    policy = AutoModelForCausalLM.from_pretrained(undisturbed / "policy")
    start = AutoModelForCausalLM.from_pretrained(recipe_dir / "model")
    assert not torch.equal(policy.model.embed_tokens.weight, start.model.embed_tokens.weight)
    assert AutoTokenizer.from_pretrained(undisturbed / "policy").eos_token == "<|end|>"


def test_the_policy_learns_the_reward(undisturbed, train, tmp_path):
    finished = train(tmp_path / "run", "num_iterations=25", "eval.every=0", "checkpoint.every=0")
    assert finished.returncode == 0, finished.stderr
    rewards = [line["reward/mean"] for line in read_metrics(tmp_path / "run")[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


def test_another_seed_gives_other_numbers(undisturbed, train, tmp_path):
    """That one seed gives one set of numbers is shown wherever a run is resumed."""
    assert train(tmp_path, "seed=1", "num_iterations=1", "resume=auto").returncode == 0
    assert timeless(read_metrics(tmp_path))[1] != timeless(read_metrics(undisturbed))[1]


@pytest.mark.parametrize("kill_after_line", [0, 3])
def test_kill_and_resume_gives_the_same_numbers(undisturbed, command, train, tmp_path, kill_after_line):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(command(run_dir), env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for_lines(run_dir, kill_after_line, process)
    time.sleep(0.02 * kill_after_line)  # so that the kills fall into different phases
    process.kill()
    process.wait()
    resumed = train(run_dir, "resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert timeless(read_metrics(run_dir)) == timeless(read_metrics(undisturbed))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_saves_and_resumes_to_the_same_numbers(undisturbed, command, train, tmp_path, number):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(command(run_dir), env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    wait_for_lines(run_dir, 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "continue with the same command and resume=auto" in output
    assert train(run_dir, "resume=auto").returncode == 0
    assert timeless(read_metrics(run_dir)) == timeless(read_metrics(undisturbed))


def test_a_finished_run_goes_on_with_more_iterations(train, tmp_path):
    run_dir = tmp_path / "run"
    assert train(run_dir, "num_iterations=1").returncode == 0
    more = train(run_dir, "num_iterations=2", "resume=auto")
    assert more.returncode == 0
    assert "the config has changed since: num_iterations: 2, before 1" in more.stdout
    assert [line["iteration"] for line in read_metrics(run_dir)] == [0, 1, 2]
    refused = train(run_dir, "num_iterations=1", "resume=auto")
    assert refused.returncode == 2
    assert f"num_iterations=1, but run_dir={run_dir} has done 2: give more" in refused.stderr
    assert "num_iterations: 2" in (run_dir / "config.yaml").read_text()


def test_a_damaged_checkpoint_is_passed_over_to_the_same_numbers(undisturbed, train, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    os.truncate(run_dir / "checkpoints/iteration_00000006/actor/__0_0.distcp", 5000)
    resumed = train(run_dir, "resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert "iteration_00000006 is damaged: actor/__0_0.distcp has 5000 bytes" in resumed.stdout
    assert "going back to the checkpoint of iteration 4" in resumed.stdout
    assert timeless(read_metrics(run_dir)) == timeless(read_metrics(undisturbed))
    assert (run_dir / "samples.jsonl").read_bytes() == (undisturbed / "samples.jsonl").read_bytes()


def test_existing_run_is_refused_with_the_way_out(undisturbed, train):
    refused = train(undisturbed)
    assert refused.returncode == 2
    assert "already holds a run: continue it with resume=auto, or choose another run_dir" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_resume_on_other_prompts_is_refused(train, recipe_dir, tmp_path):
    assert train(tmp_path / "run", "num_iterations=1").returncode == 0
    refused = train(tmp_path / "run", "resume=auto", f"data.path={recipe_dir}/heldout.jsonl")
    assert refused.returncode == 2
    assert "was trained on other prompts" in refused.stderr


def test_equal_rewards_make_no_step(train, tmp_path):
    finished = train(tmp_path, "reward.scorer=tests.trainer.scorers.AlwaysEqual", "num_iterations=2", "resume=auto")
    assert finished.returncode == 0, finished.stderr
    for line in read_metrics(tmp_path)[1:]:
        assert line["reward/zero_variance_groups"] == 1.0
        assert line["optimizer_steps"] == 0
        assert not {"loss", "grad_norm"} & line.keys()


def test_samples_without_a_verdict_are_left_out_and_counted(train, tmp_path):
    finished = train(tmp_path / "run", "reward.scorer=tests.trainer.scorers.SometimesRaises", "num_iterations=2")
    assert finished.returncode == 0, finished.stderr
    lines = read_metrics(tmp_path / "run")[1:]
    assert any(line["reward/ungraded"] > 0 for line in lines)
    assert all(torch.isfinite(torch.tensor(line["loss"])) for line in lines if "loss" in line)
    assert "no verdict" in finished.stdout + finished.stderr


def test_a_scorer_that_never_gives_a_verdict_stops_the_run(train, tmp_path):
    stopped = train(tmp_path / "run", "reward.scorer=tests.trainer.scorers.AlwaysRaises")
    assert stopped.returncode == 2
    assert "AlwaysRaises gave no verdict on any of 6 responses: " in stopped.stderr
    assert "no verdict ever" in stopped.stderr
    assert "Traceback" not in stopped.stderr


def test_full_disk_is_told_and_ends_the_run_when_the_last_save_fails(command, tmp_path):
    """A limit on file size stands for the full disk: the same write fails."""
    run = subprocess.run(
        command(tmp_path / "run"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000)),
    )
    assert run.returncode == 2
    assert "checkpoint of iteration 2 could not be written" in run.stdout
    assert "training goes on" in run.stdout
    assert "checkpoint of iteration 6 could not be written" in run.stderr
    assert "Traceback" not in run.stderr
