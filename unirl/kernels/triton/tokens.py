"""The kernels that work on a few numbers per token, in float64: chunks to records, shards to answers, coefficients."""

import triton
import triton.language as tl

from unirl.kernels.records import MAX as _MAX
from unirl.kernels.records import SHIFT as _SHIFT
from unirl.kernels.records import SUM as _SUM
from unirl.kernels.records import TARGET as _TARGET
from unirl.kernels.triton.rows import finite_base

MAX, SUM, TARGET, SHIFT = (tl.constexpr(word) for word in (_MAX, _SUM, _TARGET, _SHIFT))

# exp of it is 0 in float64; a bound keeps 0 * -inf from becoming NaN
LOWEST_EXPONENT = tl.constexpr(-1e4)


@triton.jit
def in_double(high, low):
    """A float64 that came as a sum of two float32: what a kernel is given as a number is float32."""
    return tl.cast(high, tl.float64) + tl.cast(low, tl.float64)


@triton.jit(do_not_specialize=["rows", "chunks"])
def fold_chunks(
    logits,
    stride,
    targets,
    partial,
    record,
    rows,
    chunks,
    temperature_high,
    temperature_low,
    ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """record [3 or 4, T] float64 (see `records`) from partial [2 or 3, T, chunks].

    CHUNKS: a power of two, no less than `chunks`.
    """
    temperature = in_double(temperature_high, temperature_low)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    here = token < rows
    cell = partial + token[:, None] * chunks + chunk[None, :]
    there = here[:, None] & (chunk < chunks)[None, :]
    plane = tl.cast(rows, tl.int64) * chunks
    peaks = tl.load(cell, mask=there, other=-float("inf")).to(tl.float64)
    totals = tl.load(cell + plane, mask=there, other=0.0).to(tl.float64)

    peak = tl.max(peaks, 1)
    base = finite_base(peak)
    rise = tl.maximum((peaks - base[:, None]) / temperature, LOWEST_EXPONENT)
    factor = tl.exp(rise)
    target = tl.load(targets + token, mask=here, other=-1)
    owned = target >= 0
    own = tl.load(logits + token * stride + target, mask=owned, other=0.0).to(tl.float64)
    out = record + token
    tl.store(out + MAX * rows, peak, mask=here)
    tl.store(out + SUM * rows, tl.sum(factor * totals, 1), mask=here)
    tl.store(out + TARGET * rows, tl.where(owned, (own - base) / temperature, -float("inf")), mask=here)
    if ENTROPY:
        shifts = tl.load(cell + 2 * plane, mask=there, other=0.0).to(tl.float64) / temperature
        tl.store(out + SHIFT * rows, tl.sum(factor * (shifts + rise * totals), 1), mask=here)


@triton.jit(do_not_specialize=["rows", "shards", "shard_width"])
def combine_shards(
    records,
    targets,
    result,
    rows,
    shards,
    shard_width,
    temperature_high,
    temperature_low,
    ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARDS: tl.constexpr,
):
    """result [3 or 4, T] float64, log-prob, peak, total, entropy, of records [shards, 3 or 4, T]: `records.combine`."""
    WORDS: tl.constexpr = 4 if ENTROPY else 3
    temperature = in_double(temperature_high, temperature_low)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    shard = tl.arange(0, SHARDS)
    here = token < rows
    cell = records + shard[None, :].to(tl.int64) * (WORDS * rows) + token[:, None]
    there = here[:, None] & (shard < shards)[None, :]
    row_max = tl.load(cell + MAX * rows, mask=there, other=-float("inf"))
    row_sum = tl.load(cell + SUM * rows, mask=there, other=0.0)

    peak = finite_base(tl.max(row_max, 1))
    rise = (finite_base(row_max) - peak[:, None]) / temperature
    weight = tl.where(row_sum == 0, 0.0, tl.exp(rise))
    total = tl.sum(weight * row_sum, 1)
    empty = total == 0
    log_total = tl.log(tl.where(empty, 1.0, total))
    owner = tl.load(targets + token, mask=here, other=0) // shard_width
    owned = there & (shard[None, :] == owner[:, None])
    own = tl.load(cell + TARGET * rows, mask=owned, other=0.0) + tl.where(owned, rise, 0.0)
    out = result + token
    tl.store(out, tl.where(empty, -float("inf"), tl.sum(own, 1) - log_total), mask=here)
    tl.store(out + rows, peak, mask=here)
    tl.store(out + 2 * rows, total, mask=here)
    if ENTROPY:
        shift = tl.load(cell + SHIFT * rows, mask=there, other=0.0)
        shift = tl.sum(tl.where(weight == 0, 0.0, weight * (shift + rise * row_sum)), 1)
        tl.store(out + 3 * rows, tl.where(empty, 0.0, log_total - shift / tl.where(empty, 1.0, total)), mask=here)


@triton.jit(do_not_specialize=["rows"])
def row_coefficients(
    logits,
    stride,
    targets,
    peaks,
    totals,
    entropies,
    grads_logp,
    grads_entropy,
    coefficients,
    rows,
    temperature_high,
    temperature_low,
    ENTROPY: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """coefficients [5, T] float32 of the rows' gradients: peak, a, b, gradient of the target's column, 1 if silent.

    As RowGradient in csrc/common/row_math.h; a silent row has no gradient, or no finite logit.
    """
    temperature = in_double(temperature_high, temperature_low)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    here = token < rows
    peak = tl.load(peaks + token, mask=here, other=0.0)
    total = tl.load(totals + token, mask=here, other=0.0)
    g = tl.load(grads_logp + token, mask=here, other=0.0).to(tl.float64)
    silent = (total == 0) | (g == 0)
    log_total = tl.log(tl.where(total == 0, 1.0, total))
    target = tl.load(targets + token, mask=here, other=-1)
    own = tl.load(logits + token * stride + target, mask=target >= 0, other=0.0).to(tl.float64)
    logp = (own - peak) / temperature - log_total
    p = tl.exp(logp)
    at_target = g * (1.0 - p)
    slope = g
    b = tl.zeros_like(g)
    scale = -1.0 / (tl.where(total == 0, 1.0, total) * temperature)
    if ENTROPY:
        entropy = tl.load(entropies + token, mask=here, other=0.0)
        h = tl.load(grads_entropy + token, mask=here, other=0.0).to(tl.float64)
        silent = (total == 0) | ((g == 0) & (h == 0))
        slope = g + h * (entropy - log_total)
        b = scale * h / temperature
        at_target -= h * tl.where(p == 0, 0.0, p * (logp + entropy))
    out = coefficients + token
    tl.store(out, peak.to(tl.float32), mask=here)
    tl.store(out + rows, (scale * slope).to(tl.float32), mask=here)
    tl.store(out + 2 * rows, b.to(tl.float32), mask=here)
    tl.store(out + 3 * rows, (at_target / temperature).to(tl.float32), mask=here)
    tl.store(out + 4 * rows, silent.to(tl.float32), mask=here)
