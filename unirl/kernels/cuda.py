"""The `cuda` back-end: CUDA C++ row kernels (csrc/cuda) for float32 and bfloat16 logits, compute capability 9 and 10.

docs/kernels_gpu.md says how the kernels work and what they are modelled to cost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unirl.kernels.loss_spec import LossSpec
from unirl.kernels.records import RowSoftmax, combine, record_width
from unirl.kernels.token_losses import ENTROPY_WEIGHT, WEIGHT, TokenLosses

__all__ = [
    "FUSES_ROWS",
    "HOW_TO_BUILD",
    "combine",
    "is_built",
    "obstacle",
    "policy_rows",
    "row_records",
    "scale_gradient",
    "supports",
    "token_losses",
    "write_gradient",
]

FUSES_ROWS = True

HOW_TO_BUILD = (
    "the CUDA extension is not built; install the package where nvcc 12.8 or newer is on PATH "
    "(UNIRL_CUDA=1 pip install --no-build-isolation .), or in a source tree run "
    "`UNIRL_CUDA=1 python setup.py build_ext --inplace`"
)
CAPABILITIES = (9, 10)
"""Major compute capabilities that the kernels are compiled for: Hopper, and Blackwell of data centres."""

_LIBRARY = Path(__file__).with_name("_cuda.abi3.so")


@dataclass(frozen=True)
class _Target:
    """Whose operators run, on tensors of which device: the GPU's, or the emulation's on the CPU."""

    device: str = "cuda"
    operators: str = "unirl_cuda"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(getattr(torch.ops, self.operators), name)


_target = _Target()


@cache
def is_built() -> bool:
    """Whether the extension is there; loads it on the first call."""
    if not _LIBRARY.exists():
        return False
    torch.ops.load_library(_LIBRARY)
    return True


def obstacle() -> str | None:
    """Why this back-end cannot run on this machine; None where it can."""
    if not is_built():
        return HOW_TO_BUILD
    if not torch.cuda.is_available():
        return "it needs a CUDA device, and torch finds none"
    major, minor = torch.cuda.get_device_capability()
    if major not in CAPABILITIES:
        name = torch.cuda.get_device_name()
        return f"it needs compute capability 9.x or 10.x, and {name} has {major}.{minor}: use backend='triton'"
    return None


def supports(logits: Tensor) -> bool:
    """float32 and bfloat16 on the GPU."""
    return logits.device.type == _target.device and logits.dtype in (torch.float32, torch.bfloat16)


def row_records(
    logits: Tensor, local_targets: Tensor, columns: int, temperature: float, *, with_entropy: bool
) -> Tensor:
    """As `reference.row_records`; reads the logits once."""
    record = _doubles(logits, record_width(with_entropy))
    _call(_target.row_records, logits, local_targets, columns, temperature, record)
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
    """As `reference.write_gradient`; reads the logits once and writes them once."""
    entropy = softmax.peak if softmax.entropy is None else softmax.entropy
    grad_entropy = torch.zeros_like(grad_logp) if grad_entropy is None else grad_entropy
    rows = torch.stack([softmax.peak, softmax.total, entropy, grad_logp.double(), grad_entropy.double()])
    _call(_target.write_gradient, logits, local_targets, columns, temperature, rows)


def scale_gradient(logits: Tensor, factor: Tensor) -> None:
    """As `reference.scale_gradient`, without waiting for the GPU to tell the factor."""
    _call(_target.scale_gradient, logits, factor.float())


def token_losses(spec: LossSpec, logp: Tensor, terms: Tensor) -> TokenLosses:
    """As `reference.token_losses`."""
    result = _doubles(logp, 4)
    _call(_target.token_losses, spec.kind, spec.constants, torch.stack([logp, *terms[:3]]), result)
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
    """As `cpu.policy_rows`: each row stays in the shared memory of a thread-block cluster between its statistics and

    its gradient, so the logits are read once and written once. A row too large for that (454,000 columns of float32,
    908,000 of bfloat16) goes through three passes.
    """
    if not _target.row_fits(columns, logits.dtype == torch.bfloat16):
        return _three_passes(logits, local_targets, columns, temperature, spec, terms, with_entropy)
    record, result = _doubles(logits, record_width(with_entropy)), _doubles(logits, 4)
    arguments = (logits, local_targets, columns, temperature, spec.kind, spec.constants, terms, record, result)
    _call(_target.policy_rows, *arguments)
    return record, _losses(result)


def _three_passes(
    logits: Tensor,
    local_targets: Tensor,
    columns: int,
    temperature: float,
    spec: LossSpec,
    terms: Tensor,
    with_entropy: bool,
) -> tuple[Tensor, TokenLosses]:
    record = row_records(logits, local_targets, columns, temperature, with_entropy=with_entropy)
    logp, softmax = combine(record[None], local_targets.clamp(min=0), max(columns, 1), temperature)
    losses = token_losses(spec, logp.float().double(), terms)
    grad_entropy = torch.where(logp.isfinite(), -terms[ENTROPY_WEIGHT], 0.0) if with_entropy else None
    write_gradient(logits, local_targets, columns, temperature, softmax, terms[WEIGHT] * losses.slope, grad_entropy)
    return record, losses


def _doubles(like: Tensor, words: int) -> Tensor:
    return torch.empty((words, like.shape[0]), dtype=torch.float64, device=like.device)


def _call(operator: Callable[..., None], *arguments: object) -> None:
    """On the current stream of the device that the tensors are on."""
    device = next(argument.device for argument in arguments if isinstance(argument, Tensor))
    if device.type != "cuda":  # the emulation, which has no streams
        operator(*arguments, 0)
        return
    with torch.cuda.device(device):
        operator(*arguments, torch.cuda.current_stream().cuda_stream)


def _losses(result: Tensor) -> TokenLosses:
    flags = result[3].to(torch.int64)
    return TokenLosses(*result[:3], *((flags & bit) != 0 for bit in (1, 2, 4)))
