"""Medians of device time over fresh random data in several buffers; what the memory of the device can copy."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BUFFERS = 2
WARMUPS, LONGEST_MS = 3, 1500.0
"""Runs before the measured ones, and how long the measured ones of one median may take together."""
QUEUE_CYCLES = 1_000_000
"""The GPU is kept busy that long while the run is queued: as in training, launches are hidden where nothing waits."""


@dataclass(frozen=True)
class Median:
    """Milliseconds of one run; extra_mib: memory beyond what was there before it, None on the CPU."""

    ms: float
    repeats: int
    extra_mib: float | None


def median_of(run: Callable[[Tensor], object], shape: tuple[int, int], dtype: torch.dtype, repeats: int) -> Median:
    """Times `run(logits)` for logits [T, V] of `dtype` on the default device.

    The kernels overwrite their input, so each run gets new random numbers, in a buffer other than the last one's.
    Making them lies outside of the measured time and leaves nothing of use in the caches.
    """
    buffers = [torch.empty(shape, dtype=dtype) for _ in range(BUFFERS)]
    times, extra = [], []
    warmups = min(WARMUPS, repeats)
    for repeat in range(warmups + repeats):
        logits = buffers[repeat % BUFFERS].normal_(0, 3)
        before = _allocated(reset=True)
        times.append(_milliseconds(lambda logits=logits: run(logits)))
        extra.append(_allocated() - before)
        if sum(times[warmups:]) > LONGEST_MS:
            break
    measured = times[warmups:]
    memory = extra[-1] / 2**20 if torch.cuda.is_available() else None
    return Median(statistics.median(measured), len(measured), memory)


def copy_bandwidth(size: int = 1 << 31) -> float:
    """GB/s of reading and writing at once, by copies of `size` bytes on the default device."""
    source = torch.empty(size, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    times = [_milliseconds(lambda: target.copy_(source)) for _ in range(20)]
    return 2 * size / statistics.median(times[3:]) / 1e6


def _milliseconds(run: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(QUEUE_CYCLES)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _allocated(reset: bool = False) -> int:
    """Bytes: the peak since the last reset, or what is allocated now, which a reset makes the peak."""
    if not torch.cuda.is_available():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return torch.cuda.max_memory_allocated()
