"""The `cpu` back-end: C++ row kernels (csrc/cpu) for float32 and bfloat16 logits, AVX-512, AVX2 or generic at run time.

The environment variable UNIRL_CPU_ISA (generic, avx2, avx512) forces a level; it is read at each call.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from unirl.kernels.loss_spec import LossSpec
from unirl.kernels.records import RowSoftmax, combine, record_width
from unirl.kernels.reference import scale_gradient
from unirl.kernels.token_losses import TokenLosses

__all__ = [
    "FUSES_ROWS",
    "combine",
    "is_built",
    "isa",
    "policy_rows",
    "row_records",
    "scale_gradient",
    "supports",
    "token_losses",
    "write_gradient",
]

FUSES_ROWS = True

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


def token_losses(spec: LossSpec, logp: Tensor, terms: Tensor) -> TokenLosses:
    """As `reference.token_losses`."""
    result = torch.empty((4, logp.shape[0]), dtype=torch.float64)
    torch.ops.unirl_cpu.token_losses(spec.kind, spec.constants, torch.stack([logp, *terms[:3]]), result)
    return _losses(result)


def policy_rows(
    logits: Tensor,
    local_targets: Tensor,
    columns: int,
    temperature: float,
    spec: LossSpec,
    terms: Tensor,
    *,
    with_entropy: bool,
) -> tuple[Tensor, TokenLosses]:
    """Records and losses as of `reference.row_records` and `reference.token_losses`, and the gradient of

    sum(weights * loss - entropy_weights * entropy) over the logits, for shards that hold the whole vocabulary: each row
    is overwritten while it is still in the cache.
    """
    rows = logits.shape[0]
    record = torch.empty((record_width(with_entropy), rows), dtype=torch.float64)
    result = torch.empty((4, rows), dtype=torch.float64)
    torch.ops.unirl_cpu.policy_rows(
        logits, local_targets, columns, temperature, spec.kind, spec.constants, terms, record, result
    )
    return record, _losses(result)


def _losses(result: Tensor) -> TokenLosses:
    flags = result[3].to(torch.int64)
    return TokenLosses(*result[:3], *((flags & bit) != 0 for bit in (1, 2, 4)))
