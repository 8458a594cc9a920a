"""One measurement: forward and backward of a candidate, its wall and CPU time, and its memory beyond its input."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.candidates import Batch, Candidate


@dataclass(frozen=True)
class Measurement:
    """Medians over the repeats. Memory is the largest rise of resident memory; what the allocator already held when a
    repeat began is not in it, which flatters candidates that take many small pieces (`reference`)."""

    wall_ms: float
    cpu_ms: float
    extra_mib: float


def measure(candidate: Candidate, source: Tensor, batch: Batch, with_entropy: bool, repeats: int) -> Measurement:
    """Runs `candidate` on fresh copies of `source` [T, ...], once to warm up and `repeats` times measured.

    The copy is made outside of the measurement, as a model would: logits and hidden states are intermediate results
    whose gradient flows on.
    """
    storage = torch.empty_like(source)
    wall, cpu, extra = [], [], []
    for _ in range(repeats + 1):
        leaf = storage.copy_(source).detach().requires_grad_()
        before = _reset_peak()
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        gradient = torch.autograd.grad(candidate(leaf, batch, with_entropy), leaf)[0]
        wall.append(time.perf_counter() - wall_start)
        cpu.append(time.process_time() - cpu_start)
        extra.append(_status("VmHWM") - before)
        del leaf, gradient
    return Measurement(1e3 * statistics.median(wall[1:]), 1e3 * statistics.median(cpu[1:]), max(0, *extra[1:]) / 2**20)


def _reset_peak() -> int:
    """Forgets the peak of this process's resident memory; returns the bytes resident now. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
