"""The policy loss straight from logits, where the fused kernel has it."""

from collections.abc import Callable

import torch

from unirl.algorithms import Metric, PolicyLossFunction
from unirl.errors import UserError
from unirl.kernels import fused_loss_refusal, fused_policy_loss
from unirl.train.packing import MicroBatch


def fuses(loss_fn: Callable, loss_kernel: str) -> bool:
    """Whether `loss_fn` is to be computed by `fused_loss`; `loss_kernel` as `stack.loss_kernel`.

    Raises UserError where that is `fused` and the kernel does not have the loss.
    """
    if loss_kernel == "separate" or not isinstance(loss_fn, PolicyLossFunction):
        return False
    reason = fused_loss_refusal(loss_fn.config)
    if reason is not None and loss_kernel == "fused":
        raise UserError(f"stack.loss_kernel=fused: {reason}; set it to auto or separate")
    return reason is None


def fused_loss(
    loss_fn: PolicyLossFunction, batch: MicroBatch, logits: torch.Tensor, *, temperature: float, vocab: int
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Loss and metrics of `loss_fn` on the micro-batch; logits [R, V] are overwritten with the gradient at once."""
    terms = loss_fn.surrogate_terms(batch)
    found = fused_policy_loss(
        logits,
        batch.targets,
        loss_fn.config,
        old_logp=terms.old_logp,
        anchor_logp=terms.anchor_logp,
        advantages=terms.advantages,
        weights=terms.weights,
        entropy_weights=terms.entropy_weights,
        loss_mask=terms.live,
        with_entropy=True,
        temperature=temperature,
        vocab=vocab,
    )
    _, metrics = loss_fn(batch, found.logp, found.entropy)
    return found.loss, metrics
