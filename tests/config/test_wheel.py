"""The command out of a built wheel, in a folder that holds nothing."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import unirl

ROOT = Path(unirl.__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the content of the wheel of this checkout; C++ kernels left out: they take long to compile."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    for folder in ("unirl", "examples"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for file in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(work), str(source)],
        env={**os.environ, "UNIRL_NO_EXT": "1"},
        check=True,
        timeout=300,
    )
    [wheel] = work.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(work / "site")
    return work / "site"


def test_recipes_come_with_the_wheel(installed, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "DATA_PATH": str(prompts),
        "EVAL_DATA_PATH": str(prompts),
    }
    command = [sys.executable, "-m", "unirl.train_ar", "--config-name=ar/qwen3_grpo_4b_base_dapo_sglang"]
    result = subprocess.run(
        [*command, "algorithm=drpo", "--cfg", "job"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "loss: drpo" in result.stdout


def test_the_wheel_finds_its_own_recipes_alone(installed, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "unirl.train_ar", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"recipes (found in {installed / 'unirl' / 'examples'}):" in result.stdout
    assert "  algorithm=drpo" in result.stdout


def test_what_stands_in_for_cuda_kernels_comes_with_the_wheel(installed):
    """SGLang finds its plugin by the dist-info folder."""
    stubs = ROOT / "unirl" / "rollout" / "sglang" / "cpu_stubs"
    files = {path.relative_to(stubs) for path in stubs.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    shipped = installed / "unirl" / "rollout" / "sglang" / "cpu_stubs"
    assert files == {path.relative_to(shipped) for path in shipped.rglob("*") if path.is_file()}
    assert any(path.name == "entry_points.txt" for path in files)
