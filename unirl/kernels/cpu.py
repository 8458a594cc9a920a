"""The `cpu` back-end: C++ row kernels (csrc/cpu) for float32 and bfloat16 logits, AVX-512, AVX2 or generic at run time.

The environment variable UNIRL_CPU_ISA (generic, avx2, avx512) forces a level; it is read at each call.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unirl.kernels.records import RowSoftmax, record_width

HOW_TO_BUILD = (
    "the C++ extension is not built; install the package where a C++ compiler is present "
    "(pip install --no-build-isolation .), or in a source tree run `python setup.py build_ext --inplace`"
)
_LIBRARY = Path(__file__).with_name("_cpu.abi3.so")


@cache
def is_built() -> bool:
    """Whether the extension is there; loads it on the first call."""
    if not _LIBRARY.exists():
        return False
    torch.ops.load_library(_LIBRARY)
    return True


def isa() -> str:
    """The instruction set that calls use now: avx512, avx2 or generic. RuntimeError if a forced one is not there."""
    if not is_built():
        raise RuntimeError(HOW_TO_BUILD)
    return ("generic", "avx2", "avx512")[torch.ops.unirl_cpu.isa_level()]


def supports(logits: Tensor) -> bool:
    """float32 and bfloat16 on the CPU."""
    return logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.bfloat16)


def row_records(
    logits: Tensor, local_targets: Tensor, columns: int, temperature: float, *, with_entropy: bool
) -> Tensor:
    """As `reference.row_records`."""
    record = torch.empty((record_width(with_entropy), logits.shape[0]), dtype=torch.float64)
    torch.ops.unirl_cpu.row_records(logits, local_targets, columns, temperature, record)
    return record


def write_gradient(
    logits: Tensor,
    local_targets: Tensor,
    columns: int,
    temperature: float,
    softmax: RowSoftmax,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """As `reference.write_gradient`."""
    entropy = softmax.peak if softmax.entropy is None else softmax.entropy
    grad_entropy = torch.zeros_like(grad_logp) if grad_entropy is None else grad_entropy
    rows = torch.stack([softmax.peak, softmax.total, entropy, grad_logp.double(), grad_entropy.double()])
    torch.ops.unirl_cpu.write_gradient(logits, local_targets, columns, temperature, rows)
