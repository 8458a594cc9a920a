"""The CUDA kernels on the CPU: their source, launch code and operators compiled against csrc/emulation."""

import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

from unirl.kernels import cuda

ROOT = Path(__file__).parents[2]
SOURCES = ["csrc/cuda/rows.cu", "csrc/cuda/bindings.cpp"]
OPERATORS = "unirl_cuda_emulated"


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-end `cuda` takes CPU tensors until the end of the test."""
    load()
    monkeypatch.setattr(cuda, "_target", cuda._Target("cpu", OPERATORS))
    monkeypatch.setattr(cuda, "obstacle", lambda: None)


@cache
def load() -> None:
    torch.ops.load_library(library())


def library() -> Path:
    """The compiled emulation, built anew (about 4 s) where a source has changed."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    built = ROOT / "build" / "emulation" / f"{digest.hexdigest()[:16]}.so"
    if not built.exists():
        shutil.rmtree(built.parent, ignore_errors=True)
        built.parent.mkdir(parents=True)
        own = built.with_suffix(f".{os.getpid()}")
        compile_shared(SOURCES, own)
        own.replace(built)
    return built


def compile_shared(sources: list[str], output: Path, *flags: str) -> None:
    """g++, or what CXX names, against the torch that is installed."""
    torch_root = Path(torch.__file__).parent
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-ffp-contract=off"]
    command += [f"-DUNIRL_OPERATORS={OPERATORS}", "-DUNIRL_DEVICE_KEY=CPU", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    command += [
        "-Wall",
        "-Werror",
        "-isystem",
        str(torch_root / "include"),
        *flags,
        "-x",
        "c++",
        *sources,
        "-x",
        "none",
    ]
    command += [f"-L{torch_root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-o", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the emulated CUDA kernels do not compile:\n{done.stderr[-4000:]}"
