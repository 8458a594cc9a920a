"""`backend`: every back-end; the C++ one at every instruction set that this machine has, the CUDA one emulated.

UNIRL_TEST_BACKENDS=triton runs the same tests with another choice, UNIRL_TEST_DEVICE=cuda with all tensors on the GPU:
test_triton_interpreter.py and test_triton_gpu.py do.
"""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernels import emulation
from unirl.kernels import cpu

LEVELS = ("generic", "avx2", "avx512")


def _levels() -> tuple[str, ...]:
    if not cpu.is_built() or os.environ.get("UNIRL_CPU_ISA"):
        return LEVELS[:1]
    return LEVELS[: LEVELS.index(cpu.isa()) + 1]


def _backends() -> list[str]:
    if chosen := os.environ.get("UNIRL_TEST_BACKENDS"):
        return chosen.split(",")
    return ["reference", *(f"cpu-{level}" for level in _levels()), "cuda-emulated"]


@pytest.fixture(params=_backends())
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, level = request.param.partition("-")
    if name == "cuda" and level:
        emulation.install(monkeypatch)
    elif level:
        monkeypatch.setenv("UNIRL_CPU_ISA", level)
        assert cpu.isa() == level
    return name


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(os.environ.get("UNIRL_TEST_DEVICE", "cpu")):
        yield
