"""How far rollout and actor are apart: the numbers, the alarm, the samples that are shown."""

import json
import math

import pytest
import torch

from tests.trainer.conftest import read_metrics
from unirl.config.schema import DebugConfig
from unirl.trainer.mismatch import Mismatch, alarm


def test_metrics_are_those_of_their_definitions():
    differences = torch.tensor([0.0, 0.1, -0.2, 3.0])
    found = Mismatch(differences, torch.tensor([0, 0, 1, 1])).metrics()
    ratio = differences.double().exp()
    expected = {
        "rollout_replay_logp_absdiff_mean": 3.3 / 4,
        "rollout_replay_logp_absdiff_p99": 3.0,
        "rollout_replay_logp_absdiff_max": 3.0,
        "rollout_replay_kl": (ratio - 1 - ratio.log()).mean().item(),
        "replay_rollout_kl": (ratio * ratio.log() - ratio + 1).mean().item(),
        "rollout_replay_beyond_10x": 0.25,
    }
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_kls_are_those_of_two_distributions():
    """Estimated from samples of the first, each on its own way."""
    torch.manual_seed(0)
    rollout, replay = (torch.log_softmax(torch.randn(7), 0) for _ in range(2))
    tokens = torch.multinomial(rollout.exp(), 400_000, replacement=True)
    found = Mismatch((replay - rollout)[tokens], torch.zeros_like(tokens)).metrics()
    assert found["rollout_replay_kl"] == pytest.approx((rollout.exp() * (rollout - replay)).sum().item(), rel=0.02)
    assert found["replay_rollout_kl"] == pytest.approx((replay.exp() * (replay - rollout)).sum().item(), rel=0.02)


def test_p99_leaves_one_in_a_hundred_above():
    found = Mismatch(torch.arange(1000) / 1000, torch.zeros(1000, dtype=torch.int64)).metrics()
    assert found["rollout_replay_logp_absdiff_p99"] == pytest.approx(0.989)


def test_no_tokens_no_metrics():
    nothing = Mismatch(torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert nothing.metrics() == {}
    assert nothing.worst(3) == []


def test_worst_samples_come_first():
    mismatch = Mismatch(torch.tensor([0.1, -0.1, 0.5, 0.0, -2.0]), torch.tensor([4, 4, 7, 7, 9]))
    assert [sample for sample, _, _ in mismatch.worst(2)] == [9, 7]
    assert mismatch.worst(3)[1][1:] == (pytest.approx(0.25), pytest.approx(0.5))


@pytest.mark.parametrize(("found", "limit", "rings"), [(0.2, 0.1, True), (0.1, 0.1, False), (9.0, None, False)])
def test_alarm(found, limit, rings):
    message = alarm({"rollout_replay_logp_absdiff_mean": found}, DebugConfig(mismatch_limit=limit))
    assert (message is not None) == rings
    assert alarm({}, DebugConfig()) is None


@pytest.mark.parametrize("loss", ["algorithm.loss=drpo", "algorithm.loss=ppo algorithm.use_decoupled_loss=true"])
def test_a_run_reports_its_mismatch(train, tmp_path, loss):
    finished = train(tmp_path / "run", "num_iterations=1", "eval.every=0", *loss.split())
    assert finished.returncode == 0, finished.stderr
    metrics = read_metrics(tmp_path / "run")[-1]
    assert 0 < metrics["rollout_replay_logp_absdiff_p99"] <= metrics["rollout_replay_logp_absdiff_max"] < 1e-4
    assert 0 <= metrics["rollout_replay_kl"] < 1e-8
    assert metrics["rollout_replay_beyond_10x"] == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    [worst] = [line for line in lines if line.get("worst_mismatch")]
    assert math.isclose(worst["logp_absdiff_max"], metrics["rollout_replay_logp_absdiff_max"], rel_tol=1)
    assert worst["response"] is not None


def test_an_alarm_may_stop_the_run(train, tmp_path):
    options = ("debug.mismatch_limit=1e-12", "debug.mismatch_action=stop", "eval.every=0")
    finished = train(tmp_path / "run", *options)
    assert finished.returncode == 2
    assert "error: iteration 1: rollout_replay_logp_absdiff_mean is" in finished.stderr
    assert not list((tmp_path / "run").glob("checkpoints/*"))
