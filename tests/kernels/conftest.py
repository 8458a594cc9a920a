"""`backend`: every back-end, and the C++ one at every instruction set that this machine has."""

import os

import pytest
import torch

from unirl.kernels import cpu

LEVELS = ("generic", "avx2", "avx512")


def _levels() -> tuple[str, ...]:
    if not cpu.is_built() or os.environ.get("UNIRL_CPU_ISA"):
        return LEVELS[:1]
    return LEVELS[: LEVELS.index(cpu.isa()) + 1]


@pytest.fixture(params=["reference", *(f"cpu-{level}" for level in _levels())])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, level = request.param.partition("-")
    if level:
        monkeypatch.setenv("UNIRL_CPU_ISA", level)
        assert cpu.isa() == level
    return name


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
