"""`UNIRL_CUDA=1 python setup.py build_ext` against the torch that is here, and what the result says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import toolchain
from benchmarks.kernels.toolchain import MissingTool
from unirl.kernels import BackendUnavailable, backends, cuda

ROOT = Path(__file__).parents[2]


def build(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        tmp_path,
        "--build-temp",
        tmp_path / "temp",
    ]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False
    )


def test_built_where_nvcc_is(tmp_path):
    try:
        nvcc = toolchain.tool("nvcc")
    except MissingTool as error:
        pytest.skip(str(error))
    done = build(tmp_path, UNIRL_CUDA="1", CUDA_HOME=str(nvcc.parent.parent))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    library = tmp_path / "unirl" / "kernels" / "_cuda.abi3.so"
    script = (
        "import sys, torch; torch.ops.load_library(sys.argv[1]); ops = torch.ops.unirl_cuda;"
        "print(ops.row_fits(151936, True), ops.row_fits(151936, False), ops.row_fits(2000000, True))"
    )
    told = subprocess.run([sys.executable, "-c", script, library], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "True", "False"]


def test_insisting_without_nvcc_is_refused(tmp_path):
    done = build(tmp_path, UNIRL_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0
    assert "UNIRL_CUDA=1, but nvcc is neither on PATH nor in CUDA_HOME/bin" in done.stderr


def test_an_unknown_wish_is_refused(tmp_path):
    assert "UNIRL_CUDA=yes: expected 0" in build(tmp_path, UNIRL_CUDA="yes").stderr


def test_named_without_the_extension(monkeypatch):
    monkeypatch.setattr(cuda, "is_built", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"back-end cuda: the CUDA extension is not built; .*UNIRL_CUDA=1"):
        backends.choose_backend("cuda", torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("capability", "words"), [((8, 0), "compute capability 9.x or 10.x, and A has 8.0"), ((9, 0), "")]
)
def test_which_devices_it_takes(monkeypatch, capability, words):
    monkeypatch.setattr(cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A")
    assert words in (cuda.obstacle() or "")
    assert (cuda.obstacle() is None) == (words == "")
