"""A training run that shares the server of these tests."""

import json

import pytest

from tests.trainer.conftest import read_metrics
from unirl.rollout.sglang import API_KEY_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def test_a_run_on_a_server_that_runs_already(published, train, tmp_path, monkeypatch):
    [(url, key)] = published.endpoints
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    options = ["rollout.engine=sglang", f"rollout.urls=['{url}']", "sync.mode=disk", "sync.checksum_every=1"]
    finished = train(tmp_path / "run", *options, "num_iterations=3", "eval.every=0")
    assert finished.returncode == 0, finished.stderr
    lines = read_metrics(tmp_path / "run")[1:]
    assert [line["weight_version"] for line in lines] == [0, 1, 2]
    assert all(line["rollout_replay_logp_absdiff_mean"] < 1e-5 for line in lines)
    assert all(line["rollout/server_restarts"] == 0 for line in lines)
    assert json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[-1])["status"] != "aborted"
