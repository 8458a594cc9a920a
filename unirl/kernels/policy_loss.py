"""`fused_policy_loss`: logits to policy loss; the forward pass writes the gradient over the logits."""

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from unirl.kernels.backends import choose_backend
from unirl.kernels.loss_spec import LossConfig, LossSpec
from unirl.kernels.records import UNREAD, VocabShard
from unirl.kernels.storage import check_logits, check_targets, check_temperature, mark_overwritten
from unirl.kernels.token_losses import ENTROPY_WEIGHT, TERMS, WEIGHT, TokenLosses


@dataclass(frozen=True)
class FusedPolicyLoss:
    """loss: 0-dim, differentiable; everything else [T], without graph, float32 (float64 for float64 logits) or bool.

    logp, entropy (nats; None where nobody asked): of the policy; 0 in unread rows. One that is not finite is reported,
        but its token takes no part.
    ratio: of policy to anchor; 1 where a token takes no part.
    token_loss: the loss of the token, unweighted and without the entropy bonus.
    clipped_upper, clipped_lower: beyond the upper or lower end of the trust region. dual_clipped: at the dual clip.
    """

    loss: Tensor
    logp: Tensor
    entropy: Tensor | None
    ratio: Tensor
    token_loss: Tensor
    clipped_upper: Tensor
    clipped_lower: Tensor
    dual_clipped: Tensor


def fused_policy_loss(
    logits: Tensor,
    targets: Tensor,
    config: LossSpec | LossConfig,
    *,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    loss_mask: Tensor,
    anchor_logp: Tensor | None = None,
    entropy_weights: Tensor | None = None,
    with_entropy: bool = False,
    temperature: float = 1.0,
    vocab: int | None = None,
    backend: str = "auto",
    group: dist.ProcessGroup | None = None,
) -> FusedPolicyLoss:
    """sum_t weights_t l(logp_t) - entropy_weights_t H_t with the token loss l of `config`, and its gradient at once.

    logits, targets, temperature, vocab, backend, group as for `token_logprob`.
    config: a `PolicyLossConfig`, anything with its keys, or a `LossSpec`.
    old_logp, advantages [T] float: log-probs of the rollout policy; constants, like all that follows.
    weights [T]: everything that multiplies the loss of a token: its importance weight, 0 where it was rejected,
        1 / denominator. entropy_weights [T]: coefficient / denominator of the entropy bonus; None: no bonus.
    loss_mask [T] bool: rows where it is False, or a value given here is not finite, are not read and take no part.
    anchor_logp [T]: the proximal policy of the decoupled loss; None: `old_logp`.
    with_entropy: report the entropy without a bonus, too.

    **Where autograd is on and the logits require a gradient, the forward pass writes it over them**: rows without any
    (masked, clipped, advantage 0) as zeros, without a second read. The logits are gone when this returns; what holds
    for `token_logprob` after its backward pass holds here from then on. The backward pass hands the storage on, scaled
    if the incoming gradient is not 1. Without autograd the logits stay as they are. A token whose log-prob is not
    finite has loss 0 and gradient 0.

    Raises as `token_logprob` does, and ValueError for a loss that needs more than its own row (`fused_loss_refusal`).
    """
    spec = LossSpec.of(config)
    check_logits(logits, targets)
    check_temperature(temperature)
    shard = VocabShard.of(logits.shape[1], vocab, group)
    check_targets(targets, shard.vocab)
    anchor_logp = old_logp if anchor_logp is None else anchor_logp
    per_token = {"old_logp": old_logp, "anchor_logp": anchor_logp, "advantages": advantages, "weights": weights}
    if entropy_weights is not None:
        per_token["entropy_weights"] = entropy_weights
    _check_per_token(per_token | {"loss_mask": loss_mask}, targets)
    terms, read = _terms(per_token, loss_mask)
    call = _Call(
        backend=choose_backend(backend, logits),
        spec=spec,
        shard=shard,
        temperature=float(temperature),
        targets=targets,
        read=read,
        terms=terms,
        with_entropy=with_entropy or entropy_weights is not None,
        writes=torch.is_grad_enabled() and logits.requires_grad,
    )
    return FusedPolicyLoss(*_FusedPolicyLoss.apply(logits, call))


@dataclass(frozen=True)
class _Call:
    """read [T] bool: rows that take part. terms [5, T] float64: see TERMS; all 0 where a row takes none."""

    backend: ModuleType
    spec: LossSpec
    shard: VocabShard
    temperature: float
    targets: Tensor
    read: Tensor
    terms: Tensor
    with_entropy: bool
    writes: bool


class _FusedPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, call: _Call):
        ctx.set_materialize_grads(False)
        compute = _in_one_pass if call.writes and call.shard.whole and call.backend.FUSES_ROWS else _in_stages
        logp, entropy, losses = compute(call, logits.detach())
        if call.writes:
            mark_overwritten(logits)
            ctx.save_for_backward(logits)
            ctx.backend = call.backend
        result = _result(call, _result_dtype(logits), logp, entropy, losses)
        ctx.mark_non_differentiable(*(value for value in result[1:] if value is not None))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        # Unpacking compares version counters: it raises where anything wrote to the gradient since the forward pass,
        # a first backward pass included.
        (logits,) = ctx.saved_tensors
        gradient = logits.detach()
        if grad_loss is None:
            gradient.zero_()
        else:
            ctx.backend.scale_gradient(gradient, grad_loss)
        mark_overwritten(logits)
        return gradient, None


def _in_one_pass(call: _Call, logits: Tensor) -> tuple[Tensor, Tensor | None, TokenLosses]:
    """Row by row from logits to gradient, in the back-end."""
    record, losses = call.backend.policy_rows(
        logits,
        _columns(call),
        call.shard.columns,
        call.temperature,
        call.spec,
        call.terms,
        with_entropy=call.with_entropy,
    )
    logp, softmax = call.backend.combine(record[None], call.targets, call.shard.width, call.temperature)
    return logp, softmax.entropy, losses


def _in_stages(call: _Call, logits: Tensor) -> tuple[Tensor, Tensor | None, TokenLosses]:
    """Statistics of all rows, then losses, then gradients: with a collective in between, or without gradients."""
    backend, shard, columns = call.backend, call.shard, _columns(call)
    result = _result_dtype(logits)
    record = backend.row_records(logits, columns, shard.columns, call.temperature, with_entropy=call.with_entropy)
    logp, softmax = backend.combine(shard.gather(record, result), call.targets, shard.width, call.temperature)
    # Used as it is reported, rounded: an unchanged policy has ratio 1 exactly.
    losses = backend.token_losses(call.spec, logp.to(result).double(), call.terms)
    if call.writes:
        weights, entropy_weights = call.terms[WEIGHT], call.terms[ENTROPY_WEIGHT]
        grad_entropy = torch.where(logp.isfinite(), -entropy_weights, 0.0) if call.with_entropy else None
        backend.write_gradient(
            logits, columns, shard.columns, call.temperature, softmax, weights * losses.slope, grad_entropy
        )
    return logp, softmax.entropy, losses


def _columns(call: _Call) -> Tensor:
    return torch.where(call.read, call.shard.local(call.targets), UNREAD)


def _result(
    call: _Call, dtype: torch.dtype, logp: Tensor, entropy: Tensor | None, losses: TokenLosses
) -> tuple[Tensor | None, ...]:
    """The fields of FusedPolicyLoss."""
    live = call.read & logp.isfinite()
    loss = (call.terms[WEIGHT] * losses.loss).sum()
    if entropy is not None:
        loss = loss - torch.where(live, call.terms[ENTROPY_WEIGHT] * entropy, 0.0).sum()
        entropy = entropy.to(dtype)
    logp = torch.where(call.read, logp, 0.0).to(dtype)
    ratio, token_loss = losses.ratio.to(dtype), losses.loss.to(dtype)
    return loss.to(dtype), logp, entropy, ratio, token_loss, losses.upper, losses.lower, losses.capped


def _result_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _terms(per_token: dict[str, Tensor], loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Terms [5, T] float64 with 0 where a row takes no part, and which rows do [T] bool."""
    values = torch.zeros((len(TERMS), loss_mask.numel()), dtype=torch.float64, device=loss_mask.device)
    for name, value in per_token.items():
        values[TERMS.index(name)] = value.detach()
    read = loss_mask.bool() & values.isfinite().all(0)
    return torch.where(read, values, 0.0), read


def _check_per_token(values: dict[str, Tensor], targets: Tensor) -> None:
    for name, value in values.items():
        if value.shape != targets.shape or value.device != targets.device:
            raise ValueError(
                f"fused_policy_loss: {name}: found shape {tuple(value.shape)} on {value.device}, expected [T] like "
                f"targets, {tuple(targets.shape)} on {targets.device}"
            )
