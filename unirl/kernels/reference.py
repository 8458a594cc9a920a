"""The `reference` back-end: the formulas in plain torch, for any float dtype and device.

In float64 it is what the other back-ends are tested against. Rows are taken in blocks, so no float32 copy of all the
logits ever exists.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from unirl.kernels.records import MAX, SHIFT, SUM, TARGET, UNREAD, RowSoftmax, combine, finite_base, record_width
from unirl.kernels.token_losses import token_losses

__all__ = ["FUSES_ROWS", "combine", "row_records", "scale_gradient", "supports", "token_losses", "write_gradient"]

FUSES_ROWS = False
"""Whether the back-end has `policy_rows`: a row from logits to gradient at once."""

# Elements of a block of rows: 4 MB in float32. About ten temporaries of that size live at a time.
BLOCK_ELEMENTS = 1 << 20
# exp(z) is 0 below this in float64 and float32; a bound keeps 0 * -inf from becoming NaN.
LOWEST_EXPONENT = -1e4


def supports(logits: Tensor) -> bool:
    """Every floating dtype, every device."""
    return logits.is_floating_point()


def row_records(
    logits: Tensor, local_targets: Tensor, columns: int, temperature: float, *, with_entropy: bool
) -> Tensor:
    """Records [words, T] float64 (see `records`) of logits [T, width], of which the first `columns` are real.

    local_targets [T] int64: columns, or ELSEWHERE or UNREAD.
    """
    shape = (record_width(with_entropy), logits.shape[0])
    record = torch.zeros(shape, dtype=torch.float64, device=logits.device)
    record[[MAX, TARGET]] = -torch.inf
    if columns == 0:
        return record
    empty = record.clone()
    for rows in _row_blocks(logits):
        target = local_targets[rows]
        x = _computable(logits[rows, :columns])
        record[MAX, rows] = x.amax(1).double()
        z = (x - finite_base(x.amax(1))[:, None]) / temperature
        weight = z.exp()
        record[SUM, rows] = weight.sum(1, dtype=torch.float64)
        own_z = z.gather(1, target.clamp(min=0)[:, None])[:, 0].double()
        record[TARGET, rows] = torch.where(target >= 0, own_z, -torch.inf)
        if with_entropy:
            record[SHIFT, rows] = (weight * z.clamp(min=LOWEST_EXPONENT)).sum(1, dtype=torch.float64)
    return torch.where(local_targets == UNREAD, empty, record)


def write_gradient(
    logits: Tensor,
    local_targets: Tensor,
    columns: int,
    temperature: float,
    softmax: RowSoftmax,
    grad_logp: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrites logits [T, width] with d/dlogits of sum(grad_logp * logp + grad_entropy * entropy).

    With p = softmax and z = (x - peak) / temperature - log(total) = log p, for each column j

        d logp / d x_j = (1[j = target] - p_j) / temperature,    d entropy / d x_j = -p_j (z_j + entropy) / temperature.

    Padding gets 0, and so does a row whose gradients are 0 or that has no finite logit.
    """
    silent = (grad_logp == 0) | (softmax.total == 0)
    if grad_entropy is not None:
        silent = ((grad_logp == 0) & (grad_entropy == 0)) | (softmax.total == 0)
    log_total = torch.where(softmax.total == 0, 1.0, softmax.total).log()
    for rows in _row_blocks(logits):
        x = _computable(logits[rows, :columns])
        column = {"dtype": x.dtype}
        log_p = (x - softmax.peak[rows, None].to(**column)) / temperature - log_total[rows, None].to(**column)
        p = log_p.exp()
        slope = -grad_logp[rows, None].to(**column)
        if grad_entropy is not None:
            surprise = log_p.clamp(min=LOWEST_EXPONENT) + softmax.entropy[rows, None].to(**column)
            slope = slope - grad_entropy[rows, None].to(**column) * surprise
        gradient = p * slope
        owned = (local_targets[rows] >= 0).nonzero()[:, 0]
        gradient[owned, local_targets[rows][owned]] += grad_logp[rows][owned].to(**column)
        gradient = (gradient / temperature).masked_fill_(silent[rows, None], 0.0)
        logits[rows, :columns] = gradient.to(logits.dtype)
    logits[:, columns:] = 0


def scale_gradient(logits: Tensor, factor: Tensor) -> None:
    """Multiplies logits [T, width], which hold their gradient, by `factor`, 0-dim on their device; 1 costs nothing."""
    if factor != 1:
        logits.mul_(factor)


def _computable(block: Tensor) -> Tensor:
    return block if block.dtype == torch.float64 else block.float()


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, logits.shape[1]))
    for first in range(0, logits.shape[0], step):
        yield slice(first, first + step)
