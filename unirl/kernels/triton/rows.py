"""The kernels that touch logits: statistics of chunks of rows, and the gradient written over them.

A program takes one chunk of one row, tile by tile: [VECTORS, THREADS, ELEMENTS] columns, of which each thread holds
[VECTORS, ELEMENTS], 16 bytes of neighbours at a time. All that is summed inside the loops is summed within a thread;
the threads of a program come together once per chunk. Arithmetic is float32 throughout.

`scale_high + scale_low` is log2(e) / temperature: rounded to one float32 it would tilt every exponent of a row the
same way. Both are > 0, so -inf stays -inf. `lowest` is a shift of a logit below the maximum that gives exp 0: clamping
there keeps 0 * -inf out of what has the shift as a factor. NaN survives the clamp.
"""

import triton
import triton.language as tl

from unirl.kernels.records import UNREAD as _UNREAD

UNREAD = tl.constexpr(_UNREAD)


@triton.jit
def tile_columns(VECTORS: tl.constexpr, THREADS: tl.constexpr, ELEMENTS: tl.constexpr):
    vector = tl.arange(0, VECTORS)[:, None, None]
    thread = tl.arange(0, THREADS)[None, :, None]
    element = tl.arange(0, ELEMENTS)[None, None, :]
    return (vector * THREADS + thread) * ELEMENTS + element


@triton.jit
def finite_base(peak):
    """What to subtract: the maximum, or 0 where that is -inf (-inf - -inf would be NaN)."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def clamped(shift, lowest):
    return tl.maximum(shift, lowest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exp_of(shift, scale_high, scale_low):
    """exp(shift / temperature)."""
    return tl.exp2(tl.fma(shift, scale_low, shift * scale_high))


@triton.jit
def absorb(x, peak, total, shift, scale_high, scale_low, lowest, ENTROPY: tl.constexpr):
    """Takes a tile into the sums of each thread: its maximum, sum of e = exp(d / temperature), sum of e d."""
    raised = tl.maximum(peak, tl.max(tl.max(x, 2), 0))
    base = finite_base(raised)
    step = clamped(peak - base, lowest)
    factor = exp_of(step, scale_high, scale_low)
    d = x - base[None, :, None]
    if ENTROPY:
        d = clamped(d, lowest)
    e = exp_of(d, scale_high, scale_low)
    if ENTROPY:
        shift = tl.fma(factor, tl.fma(total, step, shift), tl.sum(tl.sum(e * d, 2), 0))
    total = tl.fma(factor, total, tl.sum(tl.sum(e, 2), 0))
    return raised, total, shift


@triton.jit(do_not_specialize=["rows", "chunks"])
def chunk_statistics(
    logits,
    stride,
    targets,
    partial,
    rows,
    columns,
    chunks,
    scale_high,
    scale_low,
    lowest,
    ENTROPY: tl.constexpr,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """partial [2 or 3, T, chunks] float32 from logits [T, columns]: maximum m, sum e, and with ENTROPY sum e d.

    d = x - m, e = exp(d / temperature). A row whose target is UNREAD leaves an empty record and is not read.
    """
    TILE: tl.constexpr = VECTORS * THREADS * ELEMENTS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks) * CHUNK
    stop = tl.minimum(start + CHUNK, columns)
    if tl.load(targets + row) == UNREAD:
        stop = start
    whole = start + (stop - start) // TILE * TILE
    x_row = logits + row * stride
    offsets = tile_columns(VECTORS, THREADS, ELEMENTS)

    peak = tl.full([THREADS], -float("inf"), tl.float32)
    total = tl.zeros([THREADS], tl.float32)
    shift = tl.zeros([THREADS], tl.float32)
    for first in range(start, whole, TILE):
        x = tl.load(x_row + (first + offsets)).to(tl.float32)
        peak, total, shift = absorb(x, peak, total, shift, scale_high, scale_low, lowest, ENTROPY)
    if whole < stop:
        column = whole + offsets
        x = tl.load(x_row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        peak, total, shift = absorb(x, peak, total, shift, scale_high, scale_low, lowest, ENTROPY)

    chunk_peak = tl.max(peak, 0)
    step = clamped(peak - finite_base(chunk_peak), lowest)
    factor = exp_of(step, scale_high, scale_low)
    plane = tl.cast(rows, tl.int64) * chunks
    tl.store(partial + program, chunk_peak)
    tl.store(partial + plane + program, tl.sum(factor * total, 0))
    if ENTROPY:
        tl.store(partial + 2 * plane + program, tl.sum(factor * tl.fma(total, step, shift), 0))


@triton.jit
def gradient_of(x, peak, a, b, scale_high, scale_low, lowest, ENTROPY: tl.constexpr):
    """e (a + b d), and e a where no gradient of the entropy flows."""
    d = x - peak
    if ENTROPY:
        d = clamped(d, lowest)
    e = exp_of(d, scale_high, scale_low)
    return e * tl.fma(d, b, a) if ENTROPY else e * a


@triton.jit(do_not_specialize=["rows", "chunks"])
def write_gradient(
    logits,
    stride,
    targets,
    coefficients,
    rows,
    columns,
    width,
    chunks,
    scale_high,
    scale_low,
    lowest,
    ENTROPY: tl.constexpr,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Overwrites logits [T, width] with the gradient of `coefficients` [5, T] float32, which `row_coefficients` makes.

    Columns from `columns` on are padding and get 0, and so do silent rows: neither is read.
    """
    TILE: tl.constexpr = VECTORS * THREADS * ELEMENTS
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    start = (program % chunks) * CHUNK
    stop = tl.minimum(start + CHUNK, width)
    x_row = logits + row * stride
    offsets = tile_columns(VECTORS, THREADS, ELEMENTS)
    words = coefficients + row
    kind = logits.dtype.element_ty
    if tl.load(words + 4 * rows) != 0:
        nothing = tl.zeros([VECTORS, THREADS, ELEMENTS], kind)
        full = start + (stop - start) // TILE * TILE
        for first in range(start, full, TILE):
            tl.store(x_row + (first + offsets), nothing)
        if full < stop:
            tl.store(x_row + (full + offsets), nothing, mask=full + offsets < width)
    else:
        peak, a, b = tl.load(words), tl.load(words + rows), tl.load(words + 2 * rows)
        real = tl.maximum(start, tl.minimum(stop, columns))
        whole = start + (real - start) // TILE * TILE
        for first in range(start, whole, TILE):
            x = tl.load(x_row + (first + offsets), eviction_policy="evict_first").to(tl.float32)
            gradient = gradient_of(x, peak, a, b, scale_high, scale_low, lowest, ENTROPY)
            tl.store(x_row + (first + offsets), gradient.to(kind))
        for first in range(whole, stop, TILE):
            column = first + offsets
            x = tl.load(x_row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
            gradient = gradient_of(x, peak, a, b, scale_high, scale_low, lowest, ENTROPY)
            gradient = tl.where(column < columns, gradient, 0.0)
            tl.store(x_row + column, gradient.to(kind), mask=column < width)
        target = tl.load(targets + row)
        if (target >= start) & (target < real):
            tl.debug_barrier()  # after the tile that holds it: another thread wrote that
            tl.store(x_row + target, tl.load(words + 3 * rows).to(kind))


@triton.jit(do_not_specialize=["rows", "chunks"])
def scale_gradient(
    logits,
    stride,
    factor,
    rows,
    width,
    chunks,
    VECTORS: tl.constexpr,
    THREADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Multiplies logits [T, width] by the number at `factor`, and does nothing where that is 1.

    Programs take chunks in turn: one for each would take its time to start also where nothing is to be done.
    """
    TILE: tl.constexpr = VECTORS * THREADS * ELEMENTS
    by = tl.load(factor).to(tl.float32)
    offsets = tile_columns(VECTORS, THREADS, ELEMENTS)
    if by != 1.0:
        for chunk in range(tl.program_id(0), rows * chunks, tl.num_programs(0)):
            x_row = logits + (chunk // chunks).to(tl.int64) * stride
            start = (chunk % chunks) * CHUNK
            for first in range(start, tl.minimum(start + CHUNK, width), TILE):
                column = first + offsets
                x = tl.load(x_row + column, mask=column < width, other=0.0).to(tl.float32)
                tl.store(x_row + column, (x * by).to(logits.dtype.element_ty), mask=column < width)
