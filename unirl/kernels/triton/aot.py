"""Ahead-of-time compilation of every kernel, without a GPU: for gates on the compiled code.

Not to be used in a process with TRITON_INTERPRET=1: kernels are then Python functions and cannot be compiled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unirl.kernels.loss_spec import LOSSES
from unirl.kernels.triton import INTERPRETED, losses, rows, tokens, tuning

ARCHITECTURES = ("sm_90", "sm_100")
VOCAB_CHUNKS = 16
"""Chunks of a row, as a power of two, for which `fold_chunks` is compiled: Qwen3's vocabulary has 10 or 19."""
SHARDS = 8

_POINTERS = {
    "logits": None,  # of the dtype of the logits
    "partial": "*fp32",
    "coefficients": "*fp32",
    "targets": "*i64",
    "grads_logp": "*fp32",
    "grads_entropy": "*fp32",
    "flags": "*u8",
    "factor": "*fp32",
}
_NUMBERS = {
    "stride": "i64",
    **dict.fromkeys(("rows", "columns", "width", "chunks", "shards", "shard_width"), "i32"),
    **dict.fromkeys(("scale_high", "scale_low", "lowest", "temperature_high", "temperature_low"), "fp32"),
}
# As at a launch with a vocabulary and a row stride that are multiples of 16, as all padded ones are.
_ALIGNED = ("stride", "columns", "width")


@dataclass(frozen=True)
class Variant:
    """A kernel with its compile-time constants. dtype: of the logits; None where it has none.

    tile: elements that a thread takes per turn of the inner loop, element_bytes: of one of them, passes: reads and
    writes of each element of the logits; 0 for kernels that work on a few numbers per token.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    warps: int
    dtype: torch.dtype | None = None
    tile: int = 0
    element_bytes: int = 0
    passes: int = 0


@dataclass(frozen=True)
class Compiled:
    """shared: bytes of shared memory of a program. entry: the kernel's symbol in the cubin."""

    variant: Variant
    arch: str
    cubin: bytes
    entry: str
    shared: int


def variants(arch: str) -> Iterator[Variant]:
    """Every kernel as it is launched on `arch`, by dtype of the logits, with and without the entropy."""
    for dtype in (torch.bfloat16, torch.float32):
        for with_entropy in (False, True):
            yield from _row_variants(arch, dtype, with_entropy)
    for with_entropy in (False, True):
        constants = {"ENTROPY": with_entropy, "TOKENS": tuning.TOKENS, "SHARDS": SHARDS}
        yield Variant(f"combine_shards{_suffix(None, with_entropy)}", tokens.combine_shards, constants, 1)
    for kind, loss in enumerate(LOSSES):
        yield Variant(f"token_losses-{loss}", losses.token_losses, {"KIND": kind, "TOKENS": tuning.TOKENS}, 1)


def compile_kernels(arch: str) -> dict[str, Compiled]:
    """Variants by name, compiled for `arch` (sm_90, sm_100). Raises RuntimeError in the interpreter."""
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 is set: unset it, in a process of its own, to compile kernels")
    return {variant.name: _compile(variant, arch) for variant in variants(arch)}


def write_cubins(kernels: dict[str, Compiled], folder: Path) -> dict[str, Path]:
    """Writes `folder`/NAME.cubin for each of `kernels`; returns the files by name."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.cubin" for name in kernels}
    for name, file in files.items():
        file.write_bytes(kernels[name].cubin)
    return files


def _row_variants(arch: str, dtype: torch.dtype, with_entropy: bool) -> Iterator[Variant]:
    suffix = _suffix(dtype, with_entropy)
    for kernel, table, passes in (
        (rows.chunk_statistics, tuning.STATISTICS, 1),
        (rows.write_gradient, tuning.GRADIENT, 2),
    ):
        shape = tuning.row_shape(table, arch, dtype, with_entropy)
        constants = shape.constants(dtype)
        yield Variant(
            name=f"{kernel.__name__}{suffix}",
            kernel=kernel,
            constants=constants | {"ENTROPY": with_entropy},
            warps=shape.warps,
            dtype=dtype,
            tile=constants["VECTORS"] * constants["ELEMENTS"],
            element_bytes=dtype.itemsize,
            passes=passes,
        )
    if not with_entropy:
        yield Variant(
            f"scale_gradient{suffix}",
            rows.scale_gradient,
            constants,
            shape.warps,
            dtype,
            constants["VECTORS"] * constants["ELEMENTS"],
            dtype.itemsize,
            2,
        )
    few = {"ENTROPY": with_entropy, "TOKENS": tuning.TOKENS}
    yield Variant(f"fold_chunks{suffix}", tokens.fold_chunks, few | {"CHUNKS": VOCAB_CHUNKS}, 1, dtype)
    yield Variant(f"row_coefficients{suffix}", tokens.row_coefficients, few, 1, dtype)


def _suffix(dtype: torch.dtype | None, with_entropy: bool) -> str:
    label = "" if dtype is None else "-" + str(dtype).removeprefix("torch.")
    return label + ("-entropy" if with_entropy else "")


def _compile(variant: Variant, arch: str) -> Compiled:
    names = variant.kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else _type(name, variant.dtype) for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in _ALIGNED]
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), tuning.WARP_THREADS)
    compiled = triton.compile(source, target=target, options={"num_warps": variant.warps})
    return Compiled(variant, arch, compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared)


def _type(argument: str, dtype: torch.dtype | None) -> str:
    if argument == "logits":
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[dtype]
    return _NUMBERS.get(argument) or _POINTERS.get(argument) or "*fp64"
