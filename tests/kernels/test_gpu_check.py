"""scripts/gpu_check.sh: all of its Python on the CPU, and what it says where there is no GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["scripts/gpu_check.sh", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_dry_run(tmp_path):
    found = run("--dry-run", OUTPUT=str(tmp_path))
    assert found.returncode == 0, found.stdout + found.stderr
    (file,) = tmp_path.glob("kernels_gpu_*.json")
    report = json.loads(file.read_text())
    timed = {(row["kernel"], row["candidate"]) for row in report["results"] if row["ms"] > 0}
    assert timed == {
        ("statistics pass", "triton"),
        ("gradient pass", "triton"),
        ("token_logprob", "triton"),
        ("token_logprob", "eager"),
        ("fused_policy_loss", "triton"),
        ("fused_policy_loss", "triton, two kernels"),
        ("fused_policy_loss", "eager"),
    }
    for row in report["results"]:
        assert ("gb_per_s" in row) == (row["candidate"] != "eager")
    assert {row["with_entropy"] for row in report["results"]} == {True, False}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu():
    found = run()
    assert found.returncode == 2
    assert "finds no CUDA device" in found.stderr
    assert "--dry-run" in found.stderr
    assert run("--help").returncode == 2
