"""`linear_token_logprob`: from hidden states and head to log-probs and entropies, a few rows of logits at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unirl.kernels.backends import choose_backend
from unirl.kernels.records import RowSoftmax, VocabShard
from unirl.kernels.storage import check_targets, check_temperature

# Logits that exist at a time where the caller does not say. The product with the head reads all of its weight for each
# chunk, so chunks must not be small: this is 441 rows of Qwen3's vocabulary in float32.
CHUNK_BYTES = 256 << 20


def linear_token_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    backend: str = "auto",
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprob(hidden @ weight.T, targets, ...)` without ever holding more than `chunk_tokens` rows of logits.

    hidden [T, H] and weight [V_local, H], of one float dtype, which is that of the logits; targets [T] int64.
    chunk_tokens: rows of logits at a time; None: as many as fit 256 MiB. Everything else, and what is returned, as for
    `token_logprob`.

    Gradients flow to `hidden` and `weight`: the backward pass computes each chunk of logits again, writes the gradient
    over it and multiplies it out, so it costs one more product with the head than plain autograd. Chunks into which no
    gradient flows are left out. Weight gradients add up in float32 or better. With `group`, every rank passes the same
    hidden states; the forward pass makes one all-gather, and the backward pass one all-reduce that gives every rank the
    whole gradient of `hidden`.

    Raises ValueError for shapes, temperature, targets or `chunk_tokens` that do not fit, TypeError for dtypes,
    `BackendUnavailable` where `backend` cannot take logits of this dtype.
    """
    check_head(hidden, weight, targets, chunk_tokens)
    check_temperature(temperature)
    shard = VocabShard.of(weight.shape[0], vocab, group)
    check_targets(targets, shard.vocab)
    chunk_tokens = chunk_tokens or default_chunk_tokens(weight)
    call = _Call(choose_backend(backend, hidden), shard, float(temperature), with_entropy, chunk_tokens)
    return _LinearTokenLogprob.apply(hidden, weight, targets, call)


@dataclass(frozen=True)
class _Call:
    backend: ModuleType
    shard: VocabShard
    temperature: float
    with_entropy: bool
    chunk_tokens: int


class _LinearTokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, call: _Call):
        ctx.set_materialize_grads(False)
        shard, columns = call.shard, call.shard.local(targets)
        head = Head(hidden, weight, call.chunk_tokens)
        records = [
            call.backend.row_records(
                head.logits(rows), columns[rows], shard.columns, call.temperature, with_entropy=call.with_entropy
            )
            for rows in row_chunks(hidden.shape[0], call.chunk_tokens)
        ]
        result = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        record = shard.gather(torch.cat(records, 1), result)
        logp, softmax = call.backend.combine(record, targets, shard.width, call.temperature)
        ctx.save_for_backward(hidden, weight, columns, softmax.peak, softmax.total, softmax.entropy)
        ctx.call = call
        return logp.to(result), softmax.entropy.to(result) if call.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, columns, *softmax = ctx.saved_tensors
        call: _Call = ctx.call
        nothing = torch.zeros_like(grad_entropy if grad_logp is None else grad_logp)
        grads = torch.stack([nothing if grad is None else grad for grad in (grad_logp, grad_entropy)])
        head = Head(hidden, weight, call.chunk_tokens)
        products = HeadGradients(head, *ctx.needs_input_grad[:2])
        for rows in live_chunks(row_chunks(hidden.shape[0], call.chunk_tokens), grads):
            logits = head.logits(rows)
            part = RowSoftmax(*(None if value is None else value[rows] for value in softmax))
            grad_entropy = grads[1, rows] if call.with_entropy else None
            call.backend.write_gradient(
                logits, columns[rows], call.shard.columns, call.temperature, part, grads[0, rows], grad_entropy
            )
            products.add(rows, logits)
        return *products.gradients(call.shard), None, None


def default_chunk_tokens(weight: Tensor) -> int:
    """Rows of logits that fit `CHUNK_BYTES`."""
    return max(1, CHUNK_BYTES // (weight.shape[0] * weight.element_size()))


def row_chunks(rows: int, chunk_tokens: int) -> Iterator[slice]:
    """All rows in order; one empty chunk where there are none."""
    for first in range(0, max(rows, 1), chunk_tokens):
        yield slice(first, min(first + chunk_tokens, rows))


def live_chunks(chunks: Iterator[slice], grads: Tensor) -> list[slice]:
    """Chunks into which a gradient flows; a GPU is waited for once, not for each of them."""
    chunks = list(chunks)
    flows = torch.stack([grads[:, rows].any() for rows in chunks]).tolist()
    return [rows for rows, flow in zip(chunks, flows, strict=True) if flow]


class Head:
    """Logits of some rows at a time, in one buffer."""

    def __init__(self, hidden: Tensor, weight: Tensor, chunk_tokens: int):
        self.hidden, self.weight = hidden, weight
        self._buffer = hidden.new_empty((min(chunk_tokens, hidden.shape[0]), weight.shape[0]))

    def logits(self, rows: slice) -> Tensor:
        return torch.mm(self.hidden[rows], self.weight.T, out=self.space(rows))

    def space(self, rows: slice) -> Tensor:
        """The buffer of so many rows, as it was left."""
        return self._buffer[: rows.stop - rows.start]


class HeadGradients:
    """Gradients of hidden states and head from those of the logits, summed in float32 or better."""

    def __init__(self, head: Head, wants_hidden: bool, wants_weight: bool):
        self._head = head
        wide = torch.promote_types(head.hidden.dtype, torch.float32)
        self._hidden = torch.zeros_like(head.hidden, dtype=wide) if wants_hidden else None
        self._weight = torch.zeros_like(head.weight, dtype=wide) if wants_weight else None

    def add(self, rows: slice, grad_logits: Tensor) -> None:
        hidden, weight = self._head.hidden[rows], self._head.weight
        if self._hidden is not None:
            self._hidden[rows] = grad_logits @ weight
        if self._weight is None:
            return
        if self._weight.dtype == weight.dtype:
            self._weight.addmm_(grad_logits.T, hidden)
        else:
            self._weight += grad_logits.T @ hidden

    def gradients(self, shard: VocabShard) -> tuple[Tensor | None, Tensor | None]:
        """Each shard has its own columns' part of the gradient of the hidden states: the sum is the whole."""
        if self._hidden is not None and not shard.whole:
            dist.all_reduce(self._hidden, group=shard.group)
        dtype = self._head.weight.dtype
        return tuple(None if value is None else value.to(dtype) for value in (self._hidden, self._weight))


def check_head(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int | None) -> None:
    """ValueError for shapes, devices or `chunk_tokens` that do not fit, TypeError for dtypes."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"expected hidden [T, H] and weight [V_local, H], got {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"expected targets [T], T = {hidden.shape[0]} as of hidden, got {tuple(targets.shape)}")
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype or targets.dtype != torch.int64:
        raise TypeError(
            f"expected hidden and weight of one float dtype and int64 targets, got {hidden.dtype}, {weight.dtype} "
            f"and {targets.dtype}"
        )
    if not hidden.device == weight.device == targets.device:
        raise ValueError(
            f"hidden is on {hidden.device}, weight on {weight.device}, targets on {targets.device}: expected one device"
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: expected at least 1 row of logits at a time")
