"""Every Triton kernel compiles for Hopper and Blackwell without a GPU, and what the tables promise holds."""

import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton.backends.nvidia as nvidia
from triton.runtime.jit import JITFunction

from unirl.kernels.triton import aot, losses, rows, tokens, tuning
from unirl.kernels.triton.numbers import ExponentScale, two_floats

TOOLS = Path(nvidia.__file__).parent / "bin"
ENTRY_POINTS = {
    "chunk_statistics",
    "write_gradient",
    "scale_gradient",
    "fold_chunks",
    "row_coefficients",
    "combine_shards",
    "token_losses",
}


@pytest.fixture(scope="module", params=aot.ARCHITECTURES)
def compiled(request, tmp_path_factory) -> tuple[dict, dict]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp(request.param)
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        kernels = aot.compile_kernels(request.param)
    return kernels, aot.write_cubins(kernels, folder)


def test_every_kernel_is_there(compiled):
    kernels, files = compiled
    assert {name.partition("-")[0] for name in kernels} == ENTRY_POINTS
    launched = {name for module in (rows, tokens, losses) for name, value in vars(module).items() if _launched(value)}
    assert launched == ENTRY_POINTS  # a kernel that nobody compiles would escape every gate
    for name, kernel in kernels.items():
        assert kernel.cubin[:4] == b"\x7fELF"
        assert files[name].read_bytes() == kernel.cubin


def _launched(value: object) -> bool:
    """Kernels store; what they call returns."""
    return isinstance(value, JITFunction) and "tl.store" in value.src


def test_nothing_spills_and_accesses_are_wide(compiled):
    kernels, files = compiled
    for name, kernel in kernels.items():
        usage = _tool("cuobjdump", "-res-usage", files[name])
        assert re.search(r"STACK:0\b.*LOCAL:0\b", usage), f"{name} spills registers:\n{usage}"
        if kernel.variant.passes:
            wide = re.findall(r"(LDG|STG)\S*\.128", _tool("nvdisasm", "-c", files[name]))
            assert set(wide) == ({"LDG"} if kernel.variant.passes == 1 else {"LDG", "STG"}), name


def _tool(name: str, *arguments: str | Path) -> str:
    found = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return found.stdout + found.stderr


@pytest.mark.parametrize("arch", [*aot.ARCHITECTURES, "interpreter"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_statistics_do_not_depend_on_the_entropy(arch, dtype):
    """Or a log-prob would not be the same, bit for bit, in a pass with the entropy and in one without."""
    table = tuning.STATISTICS
    assert tuning.row_shape(table, arch, dtype, True) == tuning.row_shape(table, arch, dtype, False)


def test_an_unknown_gpu_is_served():
    shape = tuning.row_shape(tuning.GRADIENT, "sm_89", torch.bfloat16, True)
    assert shape == tuning.GRADIENT["sm_90", torch.bfloat16, True]
    assert shape.constants(torch.bfloat16) == {"VECTORS": 4, "THREADS": 128, "ELEMENTS": 8, "CHUNK": 16_384}


@pytest.mark.parametrize("temperature", [1e-3, 0.6, 0.7, 1.0, 1.3, 1e3, math.log2(math.e)])
def test_numbers_as_two_floats(temperature):
    assert sum(two_floats(temperature)) == pytest.approx(temperature, rel=2.0**-47)
    scale = ExponentScale.of(temperature)
    assert scale.high + scale.low == pytest.approx(1.4426950408889634 / temperature, rel=2.0**-47)
    assert scale.low > 0  # -inf times it must be -inf, not +inf or NaN
    assert scale.high * scale.lowest == pytest.approx(-152)
