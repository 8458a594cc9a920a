"""Training runs and the audit, on the server of these tests."""

import subprocess

import pytest

from tests.trainer.conftest import ENVIRONMENT, REPLAY, read_metrics
from unirl.audit.__main__ import main
from unirl.rollout.sglang import API_KEY_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

RECIPE = [
    *("--config-name=ar/arith_drpo_tiny_sglang_cpu", "batch_size=4", "num_iterations=3"),
    *("data.size=32", "data.heldout_size=4", "data.max_prompt_tokens=90", "eval.every=0", "sync.checksum_every=1"),
]


def test_the_recipe_runs_on_a_server_that_runs_already(published, command, recipe_dir, tmp_path):
    [(url, key)] = published.endpoints
    python = command(tmp_path)[:3]
    options = [f"model.path={recipe_dir}/model", f"rollout.urls=['{url}']", f"run_dir={tmp_path}/run"]
    environment = {**ENVIRONMENT, API_KEY_VARIABLE: key}
    finished = subprocess.run(
        [*python, *RECIPE, *options], capture_output=True, text=True, env=environment, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    assert key not in finished.stdout + finished.stderr
    assert [path.name for path in (tmp_path / "run" / "pool").iterdir() if path.is_file()] == []  # the run has ended
    lines = read_metrics(tmp_path / "run")[1:]
    assert [line["weight_version"] for line in lines] == [0, 1, 2]
    assert all(line.get("rollout_replay_logp_absdiff_max", 0) < 1e-4 for line in lines)
    assert all(line["rollout/server_restarts"] == 0 for line in lines)
    assert all(line["sync/gb_per_s"] > 0 for line in lines[1:])


@pytest.mark.parametrize("narrowed", [[], REPLAY], ids=["whole", "narrowed"])
def test_the_audit_passes(published, narrowed, recipe_dir, tmp_path, monkeypatch, capsys):
    [(url, key)] = published.endpoints
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    options = ["rollout.engine=sglang", f"rollout.urls=['{url}']", "sync.mode=disk", f"run_dir={tmp_path}"]
    assert main(["rollout", "--config-name=tiny", f"--config-dir={recipe_dir}", *options, *narrowed]) == 0
    assert "19 passed, 0 failed" in capsys.readouterr().out
