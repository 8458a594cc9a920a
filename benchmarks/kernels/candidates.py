"""What is compared: by kernel, the ways to get a loss, and from it the gradient, out of logits or of hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unirl.algorithms import PolicyLossConfig, policy_loss
from unirl.kernels import fused_policy_loss, linear_token_logprob, token_logprob

HIDDEN = 64
"""Of the head of linear_token_logprob: small, so that the products with it do not hide everything else."""

CONFIG = PolicyLossConfig(loss="drpo", drpo_epsilon=0.5, loss_agg_mode="token-mean")
ENTROPY_COEF = 0.01


@dataclass(frozen=True)
class Batch:
    """T tokens: targets int64; old_logp, advantages float32; loss_mask bool, all True. head [V, HIDDEN]."""

    targets: Tensor
    old_logp: Tensor
    advantages: Tensor
    loss_mask: Tensor
    head: Tensor | None

    @staticmethod
    def random(rows: int, vocab: int, dtype: torch.dtype, with_head: bool) -> "Batch":
        """On torch's default device."""
        generator = torch.Generator(torch.get_default_device()).manual_seed(1)
        return Batch(
            targets=torch.randint(vocab, (rows,), generator=generator),
            old_logp=-12 + torch.randn(rows, generator=generator),
            advantages=torch.randn(rows, generator=generator),
            loss_mask=torch.ones(rows, dtype=torch.bool),
            head=torch.randn(vocab, HIDDEN, generator=generator).to(dtype) if with_head else None,
        )


Candidate = Callable[[Tensor, Batch, bool], Tensor]
"""candidate(logits [T, V] or hidden states [T, HIDDEN], batch, with_entropy) -> scalar loss, to be differentiated."""


def eager_log_probs(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """What one writes in torch: log_softmax in float32, gather, and autograd for the rest."""
    logp_all = torch.log_softmax(logits.float(), 1)
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    return logp, -(logp_all.exp() * logp_all).sum(1) if with_entropy else None


def candidates(kernel: str, with_compile: bool, backends: Sequence[str] = ("reference", "cpu")) -> dict[str, Candidate]:
    """By name; `eager` is what the others are compared with. backends: ours that take part, under their own names."""
    make = {
        "token_logprob": _token_logprob,
        "fused_policy_loss": _policy_loss,
        "linear_token_logprob": _linear_token_logprob,
    }[kernel]
    return make(backends, torch.compile(eager_log_probs, dynamic=False) if with_compile else None)


KERNELS = ("token_logprob", "fused_policy_loss", "linear_token_logprob")


def _token_logprob(backends: Sequence[str], compiled: Callable | None) -> dict[str, Candidate]:
    def summed(log_probs: Callable) -> Candidate:
        return lambda logits, batch, with_entropy: _sum(*log_probs(logits, batch.targets, with_entropy))

    found = {"eager": summed(eager_log_probs)} | {name: summed(_kernel(name)) for name in backends}
    return found | ({} if compiled is None else {"compile": summed(compiled)})


def _policy_loss(backends: Sequence[str], compiled: Callable | None) -> dict[str, Candidate]:
    """`two kernels`: token_logprob, the loss in torch, and autograd between them."""

    def separate(log_probs: Callable) -> Candidate:
        def run(logits: Tensor, batch: Batch, with_entropy: bool) -> Tensor:
            logp, entropy = log_probs(logits, batch.targets, with_entropy)
            loss = policy_loss(
                CONFIG,
                logp=logp,
                old_logp=batch.old_logp,
                advantages=batch.advantages,
                loss_mask=batch.loss_mask,
                cu_seqlens=torch.tensor([0, logp.numel()], device=logp.device),
            ).loss
            return loss - ENTROPY_COEF * entropy.mean() if with_entropy else loss

        return run

    def fused(backend: str) -> Candidate:
        def run(logits: Tensor, batch: Batch, with_entropy: bool) -> Tensor:
            weights = batch.loss_mask / batch.loss_mask.sum()
            return fused_policy_loss(
                logits,
                batch.targets,
                CONFIG,
                old_logp=batch.old_logp,
                advantages=batch.advantages,
                weights=weights,
                loss_mask=batch.loss_mask,
                entropy_weights=ENTROPY_COEF * weights if with_entropy else None,
                backend=backend,
            ).loss

        return run

    found = {"eager": separate(eager_log_probs)}
    for name in backends:
        found |= {} if name == "reference" else {f"{name}, two kernels": separate(_kernel(name))}
        found[name] = fused(name)
    return found | ({} if compiled is None else {"compile": separate(compiled)})


def _linear_token_logprob(backends: Sequence[str], compiled: Callable | None) -> dict[str, Candidate]:
    """Eager and `two kernels` hold all the logits, and the product with the head makes them."""

    def whole(log_probs: Callable) -> Candidate:
        return lambda hidden, batch, with_entropy: _sum(*log_probs(hidden @ batch.head.T, batch.targets, with_entropy))

    def chunked(backend: str) -> Candidate:
        def run(hidden: Tensor, batch: Batch, with_entropy: bool) -> Tensor:
            options = {"with_entropy": with_entropy, "chunk_tokens": 64, "backend": backend}
            return _sum(*linear_token_logprob(hidden, batch.head, batch.targets, **options))

        return run

    found = {"eager": whole(eager_log_probs)}
    for name in backends:
        found |= {} if name == "reference" else {f"{name}, two kernels": whole(_kernel(name))}
        found[name] = chunked(name)
    return found | ({} if compiled is None else {"compile": whole(compiled)})


def _kernel(backend: str) -> Callable:
    def run(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        return token_logprob(logits, targets, with_entropy=with_entropy, backend=backend)

    return run


def _sum(logp: Tensor, entropy: Tensor | None) -> Tensor:
    return logp.sum() if entropy is None else logp.sum() + ENTROPY_COEF * entropy.sum()
