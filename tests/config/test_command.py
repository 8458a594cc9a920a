"""The command as a user starts it: exit codes, output, and that planning loads no heavy library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import unirl
from unirl import train_ar

ROOT = Path(unirl.__file__).parent.parent
RECIPE = "--config-name=ar/qwen3_drpo_4b_base_dapo_sglang"
HEAVY = ("torch", "transformers", "megatron", "ray", "numpy")


@pytest.fixture
def data_path(tmp_path, monkeypatch):
    """DATA_PATH with the evaluation file beside it, where the 4B recipes look for it."""
    for file in ("train.jsonl", "aime_eval.jsonl"):
        (tmp_path / file).touch()
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "train.jsonl"))
    monkeypatch.delenv("EVAL_DATA_PATH", raising=False)


def start(*argv: str, cwd: Path) -> subprocess.CompletedProcess:
    """`python -m unirl.train_ar`, with the imports that Python reports on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-X", "importtime", "-m", "unirl.train_ar", *argv]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("argv", "printed"),
    [
        ([RECIPE, "num_devices=64", "--dry-run"], "64 (8 nodes of 8)"),
        ([RECIPE, "--cfg", "job"], "num_devices: 64"),
        (["--help"], "ar/qwen3_drpo_4b_base_dapo_sglang\n      DRPO on Qwen3-4B-Base"),
    ],
)
def test_nothing_heavy_is_imported(argv, printed, data_path, tmp_path):
    result = start(*argv, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert "unirl.config.compose" in imported
    assert imported.isdisjoint(HEAVY)


def test_a_refused_run_imports_nothing_heavy_either(data_path, tmp_path):
    result = start(RECIPE, "model.path=missing", cwd=tmp_path)
    assert result.returncode == 2
    assert "error: model.path: found 'missing'" in result.stderr
    assert "Traceback" not in result.stderr
    assert not [line for line in result.stderr.splitlines() if line.rpartition("|")[2].strip() in HEAVY]


def test_the_plan_shows_topology_and_batches(data_path, capsys):
    assert train_ar.main([RECIPE, "num_devices=64", "parallel.tp=4", "parallel.cp=2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    rows = {line[:32].strip(): line[32:].strip() for line in printed.splitlines()}
    assert rows["devices"] == "64 (8 nodes of 8)"
    assert rows["TP / PP / CP / EP / DP"] == "4 / 1 / 2 / 1 / 8"
    assert rows["samples per iteration"] == "512 (64 prompts x 8 samples)"
    assert rows["samples per DP rank"] == "64"
    assert rows["longest sample"] == "10,240 tokens (2,048 prompt + 8,192 new)"
    assert rows["micro-batch token budget"] == "20,480"
    assert rows["optimizer steps per iteration"] == "1 of 64 prompts"
    assert rows["total optimizer steps"] == "800"
    assert "planned only" not in printed
    assert rows["rank 63"] == "node 7 device 7, dp=7 pp=0 cp=1 tp=3"
    assert rows["engine 63"] == "node 7 device 7"
    assert rows["samples per prompt"] == "16 at temperature 1"


@pytest.mark.parametrize(
    ("preset", "prompts", "group_filter"),
    [
        ("grpo", "64", "none, all groups are kept"),
        ("dapo", "64 kept, up to 640 sampled (at most 10 rounds)", "nonzero_variance"),
        ("dapo_dynamic_bs", "64 sampled, up to 64 kept", "nonzero_variance"),
    ],
)
def test_the_plan_shows_how_many_prompts_are_sampled(preset, prompts, group_filter, data_path, capsys):
    assert train_ar.main([RECIPE, f"algorithm={preset}", "--dry-run"]) == 0
    rows = {line[:32].strip(): line[32:].strip() for line in capsys.readouterr().out.splitlines()}
    assert (rows["prompts per iteration"], rows["group filter"]) == (prompts, group_filter)


def test_all_problems_one_a_line(data_path, capsys):
    argv = [RECIPE, "num_devices=48", "parallel.tp=5", "algorithm.drpo_epsilom=1", "optimizer.lr=-1", "--dry-run"]
    assert train_ar.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split(": ")[:2] for line in printed.err.splitlines()] == [
        ["error", "algorithm.drpo_epsilom"],
        ["error", "optimizer.lr"],
        ["error", "num_devices"],
    ]


def test_a_missing_variable_says_what_to_set(monkeypatch, capsys):
    monkeypatch.delenv("DATA_PATH", raising=False)
    assert train_ar.main([RECIPE]) == 2
    assert "data.path: environment variable DATA_PATH is not set: export DATA_PATH=..." in capsys.readouterr().err


def test_a_plan_does_without_the_variable_and_says_so(monkeypatch, capsys):
    monkeypatch.delenv("DATA_PATH", raising=False)
    assert train_ar.main([RECIPE, "num_devices=64", "--dry-run"]) == 0
    assert "a run is refused: data.path: environment variable DATA_PATH is not set" in capsys.readouterr().out
    assert train_ar.main([RECIPE]) == 2  # the plan's leniency ends with it


def test_help_into_a_closed_pipe_is_quiet(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m unirl.train_ar --help | true"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, b"")
