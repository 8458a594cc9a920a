"""Every row kernel of the CUDA C++ and Triton back-ends, compiled, and what each launch of it amounts to."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kernels.machines import (
    ALONE_IPC,
    MERGE_CYCLES,
    SERIAL_CYCLES,
    TURN_CYCLES,
    WARP,
    Machine,
    Work,
    blocks_per_sm,
)
from benchmarks.kernels.sass import Kernel, Loop, kernels_of
from benchmarks.kernels.toolchain import ROOT, compile_cubin, run_host_program

BYTES = {"bfloat16": 2, "float32": 4}
SIZES = [(rows, columns) for columns in (151_936, 75_968, 37_984) for rows in (1024, 8192, 32_768)]
"""Tokens T and columns V: Qwen3's vocabulary on 1, 2 and 4 ranks."""


@dataclass(frozen=True)
class RowKernel:
    """A compiled kernel over rows of logits.

    loops: of each pass over the elements of a row, the innermost one. A second loop works on what the first one read.
    passes: reads and writes of each logit in memory. blocks_per_row: by rows and columns. shared_bytes: of a block.
    """

    name: str
    arch: str
    dtype: str
    threads: int
    passes: int
    code: Kernel
    loops: tuple[Loop, ...]
    shared_bytes: int
    blocks_per_row: Callable[[int, int], int]

    @property
    def resident(self) -> int:
        """Blocks on a multiprocessor at a time."""
        return blocks_per_sm(self.threads, self.code.registers, self.shared_bytes)

    @property
    def widths(self) -> set[int]:
        """Bits of the accesses to elements, in memory and in shared memory."""
        return {bits for loop in self.loops for bits in loop.widths("LDG", "STG", "LDS", "STS")}

    def elements(self, loop: Loop) -> int:
        """Of one thread in one turn."""
        return loop.bytes("LDG", "LDS") // BYTES[self.dtype]

    def per_element(self, count: Callable[[Loop], int]) -> float:
        """A count of one turn, per element, summed over the loops."""
        return sum(count(loop) / self.elements(loop) for loop in self.loops)

    def work(self, machine: Machine, rows: int, columns: int) -> Work:
        """What a launch for `rows` rows of `columns` columns amounts to."""
        per_row = self.blocks_per_row(rows, columns)
        warps, blocks = self.threads // WARP, rows * per_row
        turns = [math.ceil(columns / (per_row * self.threads * self.elements(loop))) for loop in self.loops]
        pairs = list(zip(turns, self.loops, strict=True))
        instructions = sum(turn * loop.instructions for turn, loop in pairs)
        logits_bytes = rows * columns * BYTES[self.dtype]
        staged = len(self.loops) > 1  # through shared memory, with copies in and out beside the loops' own accesses
        shared = self.per_element(lambda loop: loop.bytes("LDS", "STS")) * rows * columns
        return Work(
            blocks=blocks,
            resident=self.resident,
            hbm_bytes=self.passes * logits_bytes,
            # What is outside the loops is mostly one thread's work.
            instructions=blocks * (warps * instructions + self.code.straight),
            exponentials=blocks * warps * sum(turn * loop.exponentials for turn, loop in pairs),
            shared_bytes=shared + 2 * logits_bytes if staged else 0.0,
            block_s=self._staged_s(machine, instructions) if staged else self._streamed_s(machine, pairs),
        )

    def _serial_s(self, machine: Machine) -> float:
        return (self.code.double * SERIAL_CYCLES + MERGE_CYCLES) / machine.clock_hz

    def _streamed_s(self, machine: Machine, pairs: list[tuple[int, Loop]]) -> float:
        """Every turn waits for its own loads."""
        turns = sum(
            turn * (machine.latency_s + loop.instructions * TURN_CYCLES / machine.clock_hz) for turn, loop in pairs
        )
        return turns + self._serial_s(machine)

    def _staged_s(self, machine: Machine, instructions: float) -> float:
        """Copies run beside the arithmetic, but for the arrival of the first chunk and the departure of the last."""
        arithmetic = self.threads // WARP * instructions / ALONE_IPC / machine.clock_hz
        return arithmetic + self._serial_s(machine) + 1.5 * machine.latency_s


def cuda_kernels(arch: str, folder: Path) -> Iterator[RowKernel]:
    """csrc/cuda compiled for sm_90a or sm_100a, launched as its own launch code says."""
    cubin = folder / f"rows_{arch}.cubin"
    compile_cubin(ROOT / "csrc" / "cuda" / "rows.cu", arch, cubin)
    code, plans = kernels_of(cubin), _plans(folder)
    kinds = (
        ("row_records", "RecordKernel", 1, "cluster", "record_shared"),
        ("write_gradient", "GradientKernel", 2, "gradient_parts", "gradient_shared"),
        ("policy_rows", "PolicyKernel", 2, "cluster", "policy_shared"),
    )
    for dtype, element in (("bfloat16", "t"), ("float32", "f")):
        for name, kernel, passes, split, shared in kinds:
            own = next(found for symbol, found in code.items() if f"{kernel}I{element}E" in symbol)
            yield RowKernel(
                name=name,
                arch=arch,
                dtype=dtype,
                threads=plans[dtype, SIZES[0]]["threads"],
                passes=passes,
                code=own,
                loops=_loops(name, own, dtype),
                shared_bytes=max(plans[dtype, size][shared] for size in SIZES),
                blocks_per_row=lambda rows, columns, dtype=dtype, split=split: plans[dtype, (rows, columns)][split],
            )


def triton_kernels(arch: str, folder: Path) -> Iterator[RowKernel]:
    """The row kernels of unirl/kernels/triton compiled for sm_90 or sm_100."""
    from unirl.kernels.triton import aot  # needs triton

    for name, compiled in aot.compile_kernels(arch).items():
        variant = compiled.variant
        kernel = variant.kernel.__name__
        if kernel not in ("chunk_statistics", "write_gradient"):
            continue
        cubin = folder / f"{name}_{arch}.cubin"
        cubin.write_bytes(compiled.cubin)
        own = kernels_of(cubin)[compiled.entry]
        dtype = str(variant.dtype).removeprefix("torch.")
        yield RowKernel(
            name=name.replace(f"-{dtype}", ""),
            arch=arch,
            dtype=dtype,
            threads=WARP * variant.warps,
            passes=variant.passes,
            code=own,
            loops=_loops("row_records" if variant.passes == 1 else "write_gradient", own, dtype),
            shared_bytes=compiled.shared,
            blocks_per_row=lambda rows, columns, chunk=variant.constants["CHUNK"]: math.ceil(columns / chunk),
        )


def _loops(name: str, code: Kernel, dtype: str) -> tuple[Loop, ...]:
    if name == "row_records":
        return (_element_loop(code, dtype, "LDG", writes=False),)
    if name == "write_gradient":
        return (_element_loop(code, dtype, "LDG", writes=True),)
    return (_element_loop(code, dtype, "LDS", writes=False), _element_loop(code, dtype, "LDS", writes=True))


def _element_loop(code: Kernel, dtype: str, memory: str, *, writes: bool) -> Loop:
    """The innermost loop over elements in `memory`: about one exponential of each, and as much written as read, or

    nothing. The widest, where the compiler made several of different unrolling.
    """

    def fits(loop: Loop) -> bool:
        read, written = loop.bytes(memory), loop.bytes(memory.replace("LD", "ST"))
        elements = read // BYTES[dtype]
        one_each = 0 < elements <= loop.exponentials <= elements + max(2, elements // 4)
        return one_each and written == (read if writes else 0)

    found = [loop for loop in code.loops if fits(loop)]
    if not found:
        kind = "reads and writes" if writes else "only reads"
        raise ValueError(f"no innermost loop {kind} {dtype} with {memory} and takes one exponential of each element")
    return max(found, key=lambda loop: (loop.bytes(memory), -loop.instructions))


def _plans(folder: Path) -> dict[tuple[str, tuple[int, int]], dict[str, int]]:
    """Launches by dtype and size, from the launch code itself."""
    sizes = [str(number) for size in SIZES for number in size]
    lines = run_host_program(Path(__file__).with_name("plan.cu"), folder, *sizes).splitlines()
    plans = [json.loads(line) for line in lines]
    return {(plan["dtype"], (plan["rows"], plan["columns"])): plan for plan in plans}
