"""One rank of the vocabulary-parallel tests: runs every case against the dense oracle and reports what it found."""

import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from tests.kernels.dense import dense
from tests.kernels.policy import CONFIGS, surrogate, token_inputs
from tests.kernels.supports import dense_support, make_support
from unirl.kernels import (
    fused_policy_loss,
    linear_support_logprob,
    linear_token_logprob,
    support_logprob,
    token_logprob,
)

WORLD = 4
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class Case:
    """Logits of hidden [rows, 16] times a weight [shards * width, 16], of which `vocab` rows are real."""

    shards: int
    width: int
    vocab: int
    dtype: torch.dtype
    backend: str
    temperature: float = 1.0
    rows: int = 9
    offset: float = 0.0
    blank_shard: int | None = None  # all its logits are -inf

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        blank = "" if self.blank_shard is None else f"-blank{self.blank_shard}"
        size = f"{self.rows}x{self.vocab}of{self.shards}x{self.width}"
        return f"{self.backend}-{dtype}-{size}-t{self.temperature}-at{self.offset:g}{blank}"


def _cases() -> list[Case]:
    kinds = [
        (torch.float64, "reference"),
        (torch.float32, "cpu"),
        (torch.bfloat16, "cpu"),
        (torch.bfloat16, "reference"),
    ]
    if chosen := os.environ.get("UNIRL_TEST_BACKENDS"):
        kinds = [(torch.float32, backend) for backend in chosen.split(",")]
    cases = []
    for dtype, backend in kinds:
        cases += [
            Case(2, 500, 997, dtype, backend, 0.6),
            Case(2, 25_216, 50_257, dtype, backend, 1.3, rows=3),
            Case(4, 64, 130, dtype, backend, 1.0),  # the last shard is padding only
            Case(4, 300, 1190, dtype, backend, 0.6, offset=50.0),
            Case(4, 300, 1190, dtype, backend, 1.0, offset=-1e4),
            Case(4, 64, 250, dtype, backend, 1.0, blank_shard=1),
            Case(2, 11, 22, dtype, backend, rows=0),
            Case(4, 1, 4, dtype, backend),
        ]
    return cases


CASES = _cases()


def run_rank(rank: int, folder: str) -> None:
    """Entry of a spawned process; writes {case name: report} to `folder`/rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD)
    groups = {2: [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], 4: dist.group.WORLD}
    reports = {case.name: _run(case, groups[case.shards]) for case in CASES}
    torch.save(reports, Path(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


def _run(case: Case, group: dist.ProcessGroup) -> dict:
    hidden, weight, bias, targets, grads = _inputs(case)
    shard = slice(dist.get_rank(group) * case.width, (dist.get_rank(group) + 1) * case.width)
    own_hidden, own_weight = hidden.clone().requires_grad_(), weight[shard].clone().requires_grad_()
    logits = own_hidden @ own_weight.T + bias[shard]
    seen = logits.detach().clone()
    with _counting() as sent:
        logp, entropy = token_logprob(logits, targets, with_entropy=True, **_options(case, group))
        without_entropy, _ = token_logprob(logits, targets, **_options(case, group))
        (grads[0] * logp + grads[1] * entropy).sum().backward()
    own_hidden_grad = own_hidden.grad.double()
    dist.all_reduce(own_hidden_grad, group=group)  # what a column-parallel head does

    whole = _gathered(seen, group)
    expected = dense(whole, targets, case.vocab, case.temperature, grads)
    d_logits, weights, inputs = expected.gradient, weight.double(), hidden.double()
    return {
        "sent": sent,
        "logp": (logp, expected.logp),
        "entropy": (entropy, expected.entropy),
        "repeatable": torch.equal(logp, without_entropy),
        "logits": (logits.detach(), d_logits[:, shard]),  # the gradient took the place of the logits
        # value and, for the tolerance, the size of what was added up
        "hidden": (own_hidden_grad, d_logits @ weights, d_logits.abs() @ weights.abs()),
        "weight": (own_weight.grad.double(), (d_logits.T @ inputs)[shard], (d_logits.abs().T @ inputs.abs())[shard]),
        "fused": _run_fused(case, group, seen, targets, logp.detach(), whole, shard),
        "linear": _run_linear(case, group, hidden, weight, targets, grads, shard),
        "support": _run_support(case, group, seen, targets, grads, whole, shard),
        "linear support": _run_linear_support(case, group, hidden, weight, targets, grads, shard),
    }


def _options(case: Case, group: dist.ProcessGroup) -> dict:
    return {"temperature": case.temperature, "vocab": case.vocab, "backend": case.backend, "group": group}


def _run_fused(case: Case, group, logits, targets, logp, whole, shard: slice) -> dict:
    """DRPO over the same logits; the ratio's anchor lies near the policy, so that no ratio is extreme."""
    torch.manual_seed(1)
    inputs = token_inputs(logp)
    own = logits.clone().requires_grad_()
    with _counting() as sent:
        found = fused_policy_loss(own, targets, CONFIGS["drpo"], **inputs, **_options(case, group))
        found.loss.backward()
    terms = [inputs[name].double() for name in ("old_logp", "anchor_logp", "advantages")]
    policy = surrogate(CONFIGS["drpo"], found.logp.double(), *terms)
    mask = inputs["loss_mask"]
    weights, entropy_weights = (inputs[name].double() * mask for name in ("weights", "entropy_weights"))
    grads = torch.stack([weights * policy.derivative, -entropy_weights])
    gradient = dense(whole, targets, case.vocab, case.temperature, grads).gradient
    loss = (weights * policy.loss).sum() - (entropy_weights * found.entropy).sum()
    return {
        "sent": sent,
        "same_logp": torch.equal(found.logp, torch.where(mask, logp, 0.0)),
        "loss": (found.loss.detach().double(), loss.double()),
        "logits": (own.grad, gradient[:, shard]),
    }


def _run_linear(case: Case, group, hidden, weight, targets, grads, shard: slice) -> dict:
    """The head has no bias here, and three chunks of tokens."""
    own_hidden, own_weight = hidden.clone().requires_grad_(), weight[shard].clone().requires_grad_()
    with _counting() as sent:
        logp, entropy = linear_token_logprob(
            own_hidden, own_weight, targets, with_entropy=True, chunk_tokens=4, **_options(case, group)
        )
        (grads[0] * logp + grads[1] * entropy).sum().backward()
    whole = _gathered(hidden @ weight[shard].T, group)
    expected = dense(whole, targets, case.vocab, case.temperature, grads)
    return {"sent": sent, **_products(expected, (logp, entropy), own_hidden, own_weight, hidden, weight, shard)}


def _run_support(case: Case, group, logits, targets, grads, whole, shard: slice) -> dict:
    support = make_support(targets, case.vocab, min(7, case.vocab))
    own, options = logits.clone().requires_grad_(), _options(case, group)
    del options["backend"]
    with _counting() as sent:
        logp, entropy = support_logprob(own, targets, support, with_entropy=True, **options)
        (grads[0] * logp + grads[1] * entropy).sum().backward()
    expected = dense_support(whole, targets, support, case.vocab, case.temperature, grads)
    return {
        "sent": sent,
        "logp": (logp.detach(), expected.logp),
        "entropy": (entropy.detach(), expected.entropy),
        "logits": (own.grad, expected.gradient[:, shard]),
    }


def _run_linear_support(case: Case, group, hidden, weight, targets, grads, shard: slice) -> dict:
    """As `_run_linear`."""
    support = make_support(targets, case.vocab, min(7, case.vocab))
    own_hidden, own_weight = hidden.clone().requires_grad_(), weight[shard].clone().requires_grad_()
    options = _options(case, group) | {"with_entropy": True, "chunk_tokens": 4}
    del options["backend"]
    with _counting() as sent:
        logp, entropy = linear_support_logprob(own_hidden, own_weight, targets, support, **options)
        (grads[0] * logp + grads[1] * entropy).sum().backward()
    whole = _gathered(hidden @ weight[shard].T, group)
    expected = dense_support(whole, targets, support, case.vocab, case.temperature, grads)
    return {"sent": sent, **_products(expected, (logp, entropy), own_hidden, own_weight, hidden, weight, shard)}


def _products(expected, found, own_hidden, own_weight, hidden, weight, shard: slice) -> dict:
    """What a head's call gave and should have given; beside gradients, the size of what was added up."""
    d_logits, weights, inputs = expected.gradient, weight.double(), hidden.double()
    return {
        "logp": (found[0].detach(), expected.logp),
        "entropy": (found[1].detach(), expected.entropy),
        "hidden": (own_hidden.grad.double(), d_logits @ weights, d_logits.abs() @ weights.abs()),
        "weight": (own_weight.grad.double(), (d_logits.T @ inputs)[shard], (d_logits.abs().T @ inputs.abs())[shard]),
    }


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(case.shards * case.width)  # the same on every rank
    hidden = torch.randn(case.rows, 16).to(case.dtype)
    weight = torch.randn(case.shards * case.width, 16).to(case.dtype)
    bias = torch.full((case.shards * case.width,), case.offset).to(case.dtype)
    bias[case.vocab :] = 1000.0  # padding that would win
    targets = torch.randint(case.vocab, (case.rows,))
    if case.blank_shard is not None:
        bias[case.blank_shard * case.width : (case.blank_shard + 1) * case.width] = -torch.inf
        targets %= case.width  # lies in shard 0
    return hidden, weight, bias, targets, torch.randn(2, case.rows)


def _gathered(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    shards = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, logits.contiguous(), group=group)
    return torch.cat(shards, 1)


class _counting:
    """(name, bytes sent by this rank) of every collective that is called inside."""

    def __enter__(self) -> list[tuple[str, int]]:
        self.sent: list[tuple[str, int]] = []
        self.patches = [mock.patch.object(dist, name, self._wrap(name)) for name in COLLECTIVES]
        for patch in self.patches:
            patch.start()
        return self.sent

    def __exit__(self, *_) -> None:
        for patch in self.patches:
            patch.stop()

    def _wrap(self, name: str):
        original = getattr(dist, name)

        def counted(*args, **kwargs):
            payload = args[1] if name.startswith("all_gather") else args[0]
            self.sent.append((name, payload.numel() * payload.element_size()))
            return original(*args, **kwargs)

        return counted
