"""The policy loss straight from logits, where the fused kernel has it."""

from collections.abc import Callable

import torch
import torch.distributed as dist

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
    loss_fn: PolicyLossFunction,
    batch: MicroBatch,
    logits: torch.Tensor,
    *,
    temperature: float,
    vocab: int,
    group: dist.ProcessGroup | None = None,
    rows: torch.Tensor | None = None,
    of_all_rows: Callable[..., tuple[torch.Tensor, ...]] = lambda *values: values,
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Loss and metrics of `loss_fn` on the micro-batch; logits [R, V] are overwritten with the gradient at once.

    group: ranks over which the vocabulary is split. rows [R of this rank] int64: the response tokens whose logits this
    rank has, None: all; `of_all_rows(values [R of this rank], ...)` then gathers values [R]. The loss is that of the
    rows of this rank, the metrics are those of all.
    """
    terms = loss_fn.surrogate_terms(batch)

    def own(values: torch.Tensor | None) -> torch.Tensor | None:
        return values if rows is None or values is None else values[rows]

    found = fused_policy_loss(
        logits,
        own(batch.targets),
        loss_fn.config,
        old_logp=own(terms.old_logp),
        anchor_logp=own(terms.anchor_logp),
        advantages=own(terms.advantages),
        weights=own(terms.weights),
        entropy_weights=own(terms.entropy_weights),
        loss_mask=own(terms.live),
        with_entropy=True,
        temperature=temperature,
        vocab=vocab,
        group=group,
    )
    _, metrics = loss_fn(batch, *of_all_rows(found.logp, found.entropy))
    return found.loss, metrics
