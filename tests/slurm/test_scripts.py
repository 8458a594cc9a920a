"""What the job scripts say before they start anything; needs no Slurm."""

import subprocess

import pytest

from tests.slurm.conftest import ROOT

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
TRAINING = [script for script in SCRIPTS if script.stem.startswith("train_ar")]
POOL = ROOT / "examples" / "slurm" / "rollout_pool.sbatch"


def run(script, *arguments, **environment):
    environment = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": str(ROOT)} | environment
    return subprocess.run(["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_sbatch_was_called_elsewhere(script, tmp_path):
    result = run(script, "ar/arith_drpo_tiny_cpu", SLURM_SUBMIT_DIR=str(tmp_path))
    assert result.returncode == 2
    assert f"error: {tmp_path} is no checkout of unirl" in result.stderr


def test_no_run():
    result = run(POOL)
    assert result.returncode == 2
    assert "no run given: sbatch [options] rollout_pool.sbatch RUN_DIR" in result.stderr


@pytest.mark.parametrize("script", TRAINING, ids=lambda path: path.stem)
def test_no_recipe(script):
    result = run(script)
    assert result.returncode == 1
    assert "no recipe given: sbatch [options] TEMPLATE RECIPE" in result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_asks_for_a_warning_before_its_time_limit(script):
    assert "#SBATCH --signal=B:USR1@300" in script.read_text().splitlines()


def test_no_python(tmp_path):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (tmp_path / "scontrol").chmod(0o755)
    result = run(
        *(ROOT / "examples" / "slurm" / "train_ar.sbatch", "ar/arith_drpo_tiny_cpu"),
        PATH=f"{tmp_path}:/usr/bin:/bin",
        SLURM_JOB_NODELIST="n1",
        UNIRL_PYTHON=str(tmp_path / "python"),
    )
    assert result.returncode == 1
    assert f"no Python at {tmp_path / 'python'}: run 'make venv'" in result.stderr
    result = run(POOL, "runs/mine", UNIRL_PYTHON=str(tmp_path / "python"))
    assert result.returncode == 2
    assert f"no Python at {tmp_path / 'python'}: run 'make venv'" in result.stderr
