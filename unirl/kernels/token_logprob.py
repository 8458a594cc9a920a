"""`token_logprob`: token log-probs and entropies; the backward pass reuses the storage of the logits."""

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unirl.kernels.backends import choose_backend
from unirl.kernels.records import RowSoftmax, VocabShard
from unirl.kernels.storage import check_logits, check_targets, check_temperature, mark_overwritten


def token_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
    with_entropy: bool = False,
    backend: str = "auto",
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of `targets` under softmax(logits / temperature) and, if asked for, the entropy of that distribution.

    logits [T, V_local], any float dtype, stride 1 along the vocabulary (rows may lie further apart than V_local);
    targets [T] int64, ids of the whole vocabulary. `vocab` is the size of the real vocabulary: columns from there on
    are padding, excluded from every maximum and sum, with gradient 0. With `group`, rank r holds the vocabulary ids
    from r * V_local on, every rank passes the same targets and gets the same result, for one all-gather.

    Returns (logp [T], entropy [T] in nats or None), float64 for float64 logits and float32 otherwise. A row without a
    finite logit has log-prob -inf, entropy 0 and gradient 0; a NaN or +inf makes NaN of its own row only.

    The forward pass never changes the logits. **The backward pass writes the gradient over them** and returns that
    storage, so it needs O(T) memory beyond the logits. Afterwards the logits are gone: a second backward pass, another
    call on them, or the backward pass of anything that had saved them raises RuntimeError. Pass `logits.clone()` where
    they are needed again. A leaf tensor's `.grad` then shares its storage. Rows whose incoming gradients are 0 are
    zeroed without being read. With `group`, every rank must feed the same incoming gradients.

    Raises ValueError for shapes, layout, temperature or targets that do not fit, TypeError for dtypes,
    `BackendUnavailable` where `backend` (auto, reference, cpu, triton) cannot take these logits.
    """
    check_logits(logits, targets)
    check_temperature(temperature)
    shard = VocabShard.of(logits.shape[1], vocab, group)
    check_targets(targets, shard.vocab)
    return _TokenLogprob.apply(
        logits, targets, float(temperature), shard, with_entropy, choose_backend(backend, logits)
    )


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature, shard: VocabShard, with_entropy, backend: ModuleType):
        ctx.set_materialize_grads(False)
        columns = shard.local(targets)
        record = backend.row_records(logits, columns, shard.columns, temperature, with_entropy=with_entropy)
        result = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logp, softmax = backend.combine(shard.gather(record, result), targets, shard.width, temperature)
        ctx.save_for_backward(logits, columns, softmax.peak, softmax.total, softmax.entropy)
        ctx.temperature, ctx.real_columns, ctx.backend = temperature, shard.columns, backend
        return logp.to(result), softmax.entropy.to(result) if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logp, grad_entropy):
        # Unpacking compares version counters: it raises where anything wrote to the logits since the forward pass.
        logits, columns, peak, total, entropy = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(grad_entropy)
        gradient, softmax = logits.detach(), RowSoftmax(peak, total, entropy)
        ctx.backend.write_gradient(
            gradient, columns, ctx.real_columns, ctx.temperature, softmax, grad_logp, grad_entropy
        )
        mark_overwritten(logits)
        return gradient, None, None, None, None, None
