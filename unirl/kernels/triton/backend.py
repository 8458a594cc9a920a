"""Launches: what the other back-ends do in C++ or in torch, here as one or two kernels each."""

from functools import cache

import torch
import triton
from torch import Tensor

from unirl.kernels.loss_spec import LossSpec
from unirl.kernels.records import RowSoftmax, record_width
from unirl.kernels.token_losses import TokenLosses
from unirl.kernels.triton import losses, rows, tokens, tuning
from unirl.kernels.triton.numbers import ExponentScale, two_floats

FUSES_ROWS = False
INTERPRETED = triton.knobs.runtime.interpret
"""Whether TRITON_INTERPRET=1 was set when triton was imported: kernels then run in numpy, on the CPU."""


def supports(logits: Tensor) -> bool:
    """float32 and bfloat16, on a GPU, or in the interpreter on the CPU."""
    return logits.dtype in (torch.float32, torch.bfloat16) and (logits.is_cuda or (INTERPRETED and _on_cpu(logits)))


def row_records(
    logits: Tensor, local_targets: Tensor, columns: int, temperature: float, *, with_entropy: bool
) -> Tensor:
    """As `reference.row_records`: statistics of chunks of rows, then one record per row."""
    count, words = logits.shape[0], record_width(with_entropy)
    record = torch.empty((words, count), dtype=torch.float64, device=logits.device)
    if count == 0:
        return record
    shape = tuning.row_shape(tuning.STATISTICS, architecture(logits.device), logits.dtype, with_entropy)
    constants = shape.constants(logits.dtype)
    chunks = max(1, triton.cdiv(columns, constants["CHUNK"]))
    partial = torch.empty((words - 1, count, chunks), dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        rows.chunk_statistics[(count * chunks,)](
            logits,
            logits.stride(0),
            local_targets,
            partial,
            count,
            columns,
            chunks,
            *ExponentScale.of(temperature),
            ENTROPY=with_entropy,
            **constants,
            num_warps=shape.warps,
        )
        tokens.fold_chunks[_token_grid(count)](
            logits,
            logits.stride(0),
            local_targets,
            partial,
            record,
            count,
            chunks,
            *two_floats(temperature),
            ENTROPY=with_entropy,
            TOKENS=tuning.TOKENS,
            CHUNKS=triton.next_power_of_2(chunks),
            num_warps=1,
        )
    return record


def combine(records: Tensor, targets: Tensor, shard_width: int, temperature: float) -> tuple[Tensor, RowSoftmax]:
    """As `records.combine`."""
    shards, words, count = records.shape
    with_entropy = words == record_width(with_entropy=True)
    result = torch.empty((words, count), dtype=torch.float64, device=records.device)
    if count:
        with torch.cuda.device_of(records):
            tokens.combine_shards[_token_grid(count)](
                records.contiguous(),
                targets.contiguous(),
                result,
                count,
                shards,
                shard_width,
                *two_floats(temperature),
                ENTROPY=with_entropy,
                TOKENS=tuning.TOKENS,
                SHARDS=triton.next_power_of_2(shards),
                num_warps=1,
            )
    return result[0], RowSoftmax(result[1], result[2], result[3] if with_entropy else None)


def token_losses(spec: LossSpec, logp: Tensor, terms: Tensor) -> TokenLosses:
    """As `reference.token_losses`."""
    count = logp.shape[0]
    result = torch.empty((3, count), dtype=torch.float64, device=logp.device)
    flags = torch.empty((3, count), dtype=torch.uint8, device=logp.device)
    if count:
        with torch.cuda.device_of(logp):
            losses.token_losses[_token_grid(count)](
                logp.contiguous(),
                terms,
                _constants(spec, logp.device),
                result,
                flags,
                count,
                KIND=spec.kind,
                TOKENS=tuning.TOKENS,
                num_warps=1,
            )
    return TokenLosses(*result, *flags.view(torch.bool))


def write_gradient(
    logits: Tensor,
    local_targets: Tensor,
    columns: int,
    temperature: float,
    softmax: RowSoftmax,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """As `reference.write_gradient`: the constants of each row, then the rows."""
    count, width = logits.shape
    if count == 0:
        return
    with_entropy = grad_entropy is not None
    shape = tuning.row_shape(tuning.GRADIENT, architecture(logits.device), logits.dtype, with_entropy)
    constants = shape.constants(logits.dtype)
    chunks = triton.cdiv(width, constants["CHUNK"])
    coefficients = torch.empty((5, count), dtype=torch.float32, device=logits.device)
    grad_logp = grad_logp.contiguous()
    with torch.cuda.device_of(logits):
        tokens.row_coefficients[_token_grid(count)](
            logits,
            logits.stride(0),
            local_targets,
            softmax.peak,
            softmax.total,
            softmax.entropy if with_entropy else softmax.peak,
            grad_logp,
            grad_entropy.contiguous() if with_entropy else grad_logp,
            coefficients,
            count,
            *two_floats(temperature),
            ENTROPY=with_entropy,
            TOKENS=tuning.TOKENS,
            num_warps=1,
        )
        rows.write_gradient[(count * chunks,)](
            logits,
            logits.stride(0),
            local_targets,
            coefficients,
            count,
            columns,
            width,
            chunks,
            *ExponentScale.of(temperature),
            ENTROPY=with_entropy,
            **constants,
            num_warps=shape.warps,
        )


def scale_gradient(logits: Tensor, factor: Tensor) -> None:
    """As `reference.scale_gradient`, without waiting for the GPU to tell the factor."""
    count, width = logits.shape
    if count == 0:
        return
    shape = tuning.row_shape(tuning.GRADIENT, architecture(logits.device), logits.dtype, with_entropy=False)
    constants = shape.constants(logits.dtype)
    chunks = triton.cdiv(width, constants["CHUNK"])
    with torch.cuda.device_of(logits):
        rows.scale_gradient[(min(count * chunks, tuning.SCALE_PROGRAMS),)](
            logits, logits.stride(0), factor, count, width, chunks, **constants, num_warps=shape.warps
        )


@cache
def architecture(device: torch.device) -> str:
    """Key of the tuning tables."""
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _on_cpu(logits: Tensor) -> bool:
    return logits.device.type == "cpu"


def _token_grid(count: int) -> tuple[int]:
    return (triton.cdiv(count, tuning.TOKENS),)


@cache
def _constants(spec: LossSpec, device: torch.device) -> Tensor:
    """On the device once per loss: a number that a kernel is given directly would be rounded to float32."""
    return torch.tensor(spec.constants, dtype=torch.float64, device=device)
