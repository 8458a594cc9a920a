"""What is compared: each candidate maps (logits, targets) to the log-probs and, if asked for, the entropies."""

from collections.abc import Callable

import torch
from torch import Tensor

from unirl.kernels import token_logprob

Candidate = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def eager(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
    """What one writes in torch: log_softmax in float32, gather, and autograd for the rest."""
    logp_all = torch.log_softmax(logits.float(), 1)
    logp = logp_all.gather(1, targets[:, None])[:, 0]
    return logp, -(logp_all.exp() * logp_all).sum(1) if with_entropy else None


def kernel(backend: str) -> Candidate:
    def run(logits: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        return token_logprob(logits, targets, with_entropy=with_entropy, backend=backend)

    return run


def candidates(with_compile: bool) -> dict[str, Candidate]:
    """By name; `eager` is what the others are compared with."""
    found = {"eager": eager, "reference": kernel("reference"), "cpu": kernel("cpu")}
    if with_compile:
        found["compile"] = torch.compile(eager, dynamic=False)
    return found
