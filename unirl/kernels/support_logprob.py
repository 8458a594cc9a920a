"""Log-probs of tokens among those that they were sampled from: the softmax of each row over its support alone.

Of the logits [T, V] only the [T, K] of the supports are read. Shards of the vocabulary are brought together by one
sum, in which one of them adds the logit and the others 0. What follows is plain torch in float64 on every device: it is
small beside the logits.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unirl.kernels.linear_token_logprob import (
    Head,
    HeadGradients,
    check_head,
    default_chunk_tokens,
    live_chunks,
    row_chunks,
)
from unirl.kernels.records import VocabShard
from unirl.kernels.reference import LOWEST_EXPONENT
from unirl.kernels.storage import check_logits, check_targets, check_temperature, mark_overwritten

NO_TOKEN = -1


def support_logprob(
    logits: Tensor,
    targets: Tensor,
    support: Tensor,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprob` with the distribution of row t restricted to the tokens `support[t]` and renormalised there.

    support [T, K] int32: distinct ids of the whole vocabulary in any order, the target among them, filled up with -1.
    A row of nothing but -1 has log-prob -inf, entropy 0 and gradient 0, and so has one without a finite logit; a NaN
    stays in its row. One token alone has log-prob 0, entropy 0 and gradient 0.

    With `group`, every rank passes the same targets and support, for one all-reduce of K words per token. The backward
    pass writes the gradient over the logits as that of `token_logprob` does, 0 outside of the support; all else needs
    O(T * K) memory. The rest of the arguments, and what is returned, are as for `token_logprob`.

    Raises what `token_logprob` raises, and ValueError or TypeError for a support that is not as said here.
    """
    check_logits(logits, targets)
    call = _Call.of(logits.shape[1], vocab, group, targets, support, temperature, with_entropy)
    return _SupportLogprob.apply(logits, targets, support, call)


def linear_support_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    support: Tensor,
    *,
    temperature: float = 1.0,
    vocab: int | None = None,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`support_logprob(hidden @ weight.T, targets, support, ...)` without ever holding more than `chunk_tokens` rows of
    logits. Arguments, gradients and collectives are as for `linear_token_logprob`, but the backward pass does not
    compute the logits again.
    """
    check_head(hidden, weight, targets, chunk_tokens)
    call = _Call.of(weight.shape[0], vocab, group, targets, support, temperature, with_entropy)
    return _LinearSupportLogprob.apply(
        hidden, weight, targets, support, call, chunk_tokens or default_chunk_tokens(weight)
    )


@dataclass(frozen=True)
class _Call:
    """The arithmetic on [T, K]: from this shard's logits of the supports to log-probs, and back to their gradient."""

    shard: VocabShard
    temperature: float
    with_entropy: bool

    @classmethod
    def of(
        cls,
        width: int,
        vocab: int | None,
        group: dist.ProcessGroup | None,
        targets: Tensor,
        support: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> "_Call":
        check_temperature(temperature)
        shard = VocabShard.of(width, vocab, group)
        check_targets(targets, shard.vocab)
        _check_support(support, targets, shard.vocab)
        return cls(shard, float(temperature), with_entropy)

    def own_logits(self, logits: Tensor, support: Tensor) -> Tensor:
        """logits [T, width] -> [T, K], float32 or float64: of the tokens of this shard, 0 for the others."""
        columns = self.shard.local(support.long())
        result = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return logits.gather(1, columns.clamp(min=0)).to(result).masked_fill_(columns < 0, 0.0)

    def softmax(self, own_logits: Tensor, targets: Tensor, support: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log_p [T, K], -inf where there is no token, and log-probs and entropies [T], all float64."""
        if not self.shard.whole:
            dist.all_reduce(own_logits, group=self.shard.group)
        z = (own_logits.double() / self.temperature).masked_fill_(support == NO_TOKEN, -torch.inf)
        log_total = z.logsumexp(1, keepdim=True)
        log_p = z - log_total.masked_fill(log_total == -torch.inf, 0.0)
        is_target = support == targets[:, None]
        logp = torch.where(is_target, log_p, 0.0).sum(1).masked_fill_(~is_target.any(1), -torch.inf)
        return log_p, logp, -(log_p.exp() * log_p.clamp(min=LOWEST_EXPONENT)).sum(1)

    def gradient(self, log_p: Tensor, entropy: Tensor, targets: Tensor, support: Tensor, grads: Tensor) -> Tensor:
        """grads [2, T], of log-probs and entropies -> the gradient of the logits of the supports [T, K] float64.

        With log p and p as restricted, for each token j of the support

            d logp / d x_j = (1[j = target] - p_j) / temperature,
            d entropy / d x_j = -p_j (log p_j + entropy) / temperature.
        """
        p, surprise = log_p.exp(), log_p.clamp(min=LOWEST_EXPONENT) + entropy[:, None]
        grad_logp, grad_entropy = grads.double()[:, :, None]
        gradient = grad_logp * ((support == targets[:, None]).double() - p) - grad_entropy * p * surprise
        silent = (grads == 0).all(0) | (log_p == -torch.inf).all(1)
        return (gradient / self.temperature).masked_fill_(silent[:, None], 0.0)

    def write(self, logits: Tensor, support: Tensor, gradient: Tensor) -> None:
        """Overwrites logits [T, width] with the gradient [T, K] of the support's tokens, and 0 elsewhere."""
        columns = self.shard.local(support.long())
        # Ids are distinct: whatever else is added to an element is 0, so that the order of additions does not matter.
        own = gradient.to(logits.dtype).masked_fill_(columns < 0, 0.0)
        logits.zero_().scatter_add_(1, columns.clamp(min=0), own)

    def results(self, logp: Tensor, entropy: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """In float64 where `dtype`, that of the logits, is it, else in float32."""
        result = torch.float64 if dtype == torch.float64 else torch.float32
        return logp.to(result), entropy.to(result) if self.with_entropy else None


class _SupportLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, support: Tensor, call: _Call):
        ctx.set_materialize_grads(False)
        log_p, logp, entropy = call.softmax(call.own_logits(logits, support), targets, support)
        ctx.save_for_backward(logits, targets, support, log_p, entropy)
        ctx.call = call
        return call.results(logp, entropy, logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        # Unpacking compares version counters: it raises where anything wrote to the logits since the forward pass.
        logits, targets, support, log_p, entropy = ctx.saved_tensors
        gradient = logits.detach()
        ctx.call.write(gradient, support, ctx.call.gradient(log_p, entropy, targets, support, _both(grads)))
        mark_overwritten(logits)
        return gradient, None, None, None


class _LinearSupportLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, support: Tensor, call: _Call, chunk_tokens: int):
        ctx.set_materialize_grads(False)
        head = Head(hidden, weight, chunk_tokens)
        chunks = row_chunks(hidden.shape[0], chunk_tokens)
        own_logits = torch.cat([call.own_logits(head.logits(rows), support[rows]) for rows in chunks])
        log_p, logp, entropy = call.softmax(own_logits, targets, support)
        ctx.save_for_backward(hidden, weight, targets, support, log_p, entropy)
        ctx.call, ctx.chunk_tokens = call, chunk_tokens
        return call.results(logp, entropy, hidden.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        hidden, weight, targets, support, log_p, entropy = ctx.saved_tensors
        grads, call = _both(grads), ctx.call
        gradient = call.gradient(log_p, entropy, targets, support, grads)
        head = Head(hidden, weight, ctx.chunk_tokens)
        products = HeadGradients(head, *ctx.needs_input_grad[:2])
        for rows in live_chunks(row_chunks(hidden.shape[0], ctx.chunk_tokens), grads):
            grad_logits = head.space(rows)
            call.write(grad_logits, support[rows], gradient[rows])
            products.add(rows, grad_logits)
        return *products.gradients(call.shard), None, None, None, None


def _both(grads: tuple[Tensor | None, Tensor | None]) -> Tensor:
    """[2, T]: of log-probs and entropies, 0 for those that are None."""
    given = next(grad for grad in grads if grad is not None)
    return torch.stack([torch.zeros_like(given) if grad is None else grad for grad in grads])


def _check_support(support: Tensor, targets: Tensor, vocab: int) -> None:
    if support.dim() != 2 or support.shape[0] != targets.shape[0]:
        raise ValueError(f"expected support [T, K], T = {targets.shape[0]} as of targets, got {tuple(support.shape)}")
    if support.dtype != torch.int32:
        raise TypeError(f"expected int32 support, got {support.dtype}")
    if support.device != targets.device:
        raise ValueError(f"support is on {support.device}, targets on {targets.device}: expected the same device")
    if support.shape[1] > vocab:
        raise ValueError(f"support of {support.shape[1]} tokens, more than the vocabulary of {vocab}: lower top_k")
    nothing = support == NO_TOKEN
    ordered = support.sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_TOKEN)
    has_target = (support == targets[:, None]).any(1) | nothing.all(1)
    _require(((support >= 0) & (support < vocab) | nothing).all(), f"support: expected ids in [0, {vocab}), or -1")
    _require(~repeated.any(), "support: expected distinct tokens in each row")
    _require(has_target.all(), "support: expected each target among the tokens of its row")


def _require(condition: Tensor, message: str) -> None:
    """ValueError where it does not hold; on a GPU, which is not waited for, a device-side assert."""
    if condition.is_cuda:
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
