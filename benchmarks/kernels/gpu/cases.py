"""What is timed on a GPU: the functions, forward and backward, ours and theirs, and each of our passes alone."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.kernels.candidates import Batch, candidates
from unirl.kernels import reference
from unirl.kernels.backends import choose_backend

FLOOR_PASSES = 2
"""Over the logits, at least: a read, and the gradient's write."""


@dataclass(frozen=True)
class Case:
    """run(logits [T, V]). passes: over the logits, that it makes by design; None for what is not ours."""

    kernel: str
    candidate: str
    with_entropy: bool
    run: Callable[[Tensor], object]
    passes: int | None = None


def cases(
    rows: int, vocab: int, dtype: torch.dtype, with_entropy: bool, backends: list[str], with_compile: bool
) -> list[Case]:
    """Ours first: where time is short, rivals are left out."""
    batch = Batch.random(rows, vocab, dtype, with_head=False)
    found = [case for name in backends for case in _passes(name, batch, dtype, with_entropy)]
    whole = []
    for kernel in ("token_logprob", "fused_policy_loss"):
        for name, candidate in candidates(kernel, with_compile=with_compile, backends=backends).items():
            passes = _planned(kernel, name) if name.split(",")[0] in backends else None
            run = _forward_and_backward(candidate, batch, with_entropy)
            whole.append(Case(kernel, name, with_entropy, run, passes))
    if not with_entropy and importlib.util.find_spec("liger_kernel"):
        whole.append(Case("fused_policy_loss", "liger", False, _liger(batch)))
    return found + sorted(whole, key=lambda case: case.passes is None)


def _planned(kernel: str, candidate: str) -> int:
    """Two where a row stays on the chip between its statistics and its gradient."""
    return 2 if (kernel, candidate) == ("fused_policy_loss", "cuda") else 3


def _forward_and_backward(candidate: Callable, batch: Batch, with_entropy: bool) -> Callable[[Tensor], object]:
    def run(logits: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(candidate(leaf, batch, with_entropy), leaf)[0]

    return run


def _passes(name: str, batch: Batch, dtype: torch.dtype, with_entropy: bool) -> list[Case]:
    """Statistics alone and gradient alone."""
    backend = choose_backend(name, torch.zeros(1, 1, dtype=dtype))
    targets, rows = batch.targets, batch.targets.numel()
    grad_logp = torch.randn(rows)
    grad_entropy = torch.randn(rows) if with_entropy else None
    record = reference.row_records(torch.randn(rows, 64), targets % 64, 64, 1.0, with_entropy=with_entropy)
    _, softmax = reference.combine(record[None], targets % 64, 64, 1.0)

    def statistics(logits: Tensor) -> None:
        backend.row_records(logits, targets, logits.shape[1], 1.0, with_entropy=with_entropy)

    def gradient(logits: Tensor) -> None:
        backend.write_gradient(logits, targets, logits.shape[1], 1.0, softmax, grad_logp, grad_entropy)

    return [
        Case("statistics pass", name, with_entropy, statistics, 1),
        Case("gradient pass", name, with_entropy, gradient, 2),
    ]


def _liger(batch: Batch) -> Callable[[Tensor], object]:
    """Liger-Kernel's GRPO loss, clipped ratios without a KL term, in place; it drops the last position's logits."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    ids, old_logp = batch.targets[None, :-1].contiguous(), batch.old_logp[None, :-1].contiguous()
    mask = torch.ones_like(ids)

    def run(logits: Tensor) -> Tensor:
        leaf = logits.detach()[None].requires_grad_()
        advantages = batch.advantages[:1]
        losses = triton_grpo_loss(leaf, old_logp, None, ids, advantages, mask, temperature=1.0, beta=0.0, inplace=True)
        return torch.autograd.grad(losses[0].sum(), leaf)[0]

    return run
