"""`python -m unirl.audit kernels`: every kernel and back-end of this machine against dense float64."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unirl.algorithms import PolicyLossConfig, policy_loss
from unirl.errors import UserError
from unirl.kernels import (
    BackendUnavailable,
    available_backends,
    fused_policy_loss,
    linear_token_logprob,
    token_logprob,
)
from unirl.kernels.backends import choose_backend

TOLERANCES = {
    torch.float64: {"value": 1e-12, "gradient": 1e-12, "loss": 1e-12, "product": 1e-12},
    torch.float32: {"value": 1e-6, "gradient": 1e-6, "loss": 5e-6, "product": 3e-5},
    # values are as exact as of float32; a gradient is stored with 8 bits, a product adds up what was stored so
    torch.bfloat16: {"value": 1e-6, "gradient": 2.0**-8, "loss": 5e-6, "product": 2.0**-7},
}
"""Largest error by dtype of the logits and kind of result, relative to 1 + its size: of a value its own, that of
a gradient the largest entry of its row, that of a product the sum of the magnitudes that were added up."""

TRUNCATED = 2.0**-7
"""Tolerance of a bfloat16 gradient in Triton's interpreter, which truncates where every device rounds."""

DTYPES = {"reference": (torch.float64, torch.float32, torch.bfloat16), "cpu": (torch.float32, torch.bfloat16)}
GPU_BACKENDS = ("triton", "cuda")
LOSSES = {
    "ppo": PolicyLossConfig(loss="ppo", eps_clip=0.2, eps_clip_higher=0.28, c_clip=3.0, entropy_coef=0.01),
    "drpo": PolicyLossConfig(loss="drpo", drpo_epsilon=0.5, entropy_coef=0.01),
    "spo": PolicyLossConfig(loss="spo", spo_epsilon=0.2, entropy_coef=0.01),
    "dppo": PolicyLossConfig(loss="dppo", dppo_delta=0.05, entropy_coef=0.01),
    "sapo": PolicyLossConfig(loss="sapo", entropy_coef=0.01),
    "cispo": PolicyLossConfig(loss="cispo", eps_clip=0.5, eps_clip_higher=0.5, entropy_coef=0.01),
}
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Size:
    """Tokens, columns of storage, of which `vocab` are real, and what is added to every logit."""

    tokens: int
    width: int
    vocab: int
    offset: float = 0.0

    def __str__(self) -> str:
        shift = f" at {self.offset:g}" if self.offset else ""
        return f"{self.tokens} x {self.vocab}{shift}"


SIZES = (
    Size(0, 11, 11),
    Size(1, 1, 1),
    Size(63, 64, 11),
    Size(33, 5003, 5001, 80.0),
    Size(33, 5003, 5001, -1e4),
    Size(4, 50_257, 50_257),
    Size(3, 152_064, 151_936),
)
HEAD_SIZES = (Size(0, 11, 11), Size(1, 1, 1), Size(63, 64, 11), Size(33, 5003, 5001), Size(4, 50_257, 50_257))
LOSS_SIZES = (Size(63, 64, 11), Size(20, 5003, 5001))
INTERPRETER_TOKENS = 33
"""Most tokens of a size that is also checked in Triton's interpreter, where a row takes milliseconds."""


@dataclass(frozen=True)
class Check:
    """The largest error of one result of one kernel, and what is allowed."""

    kernel: str
    result: str
    backend: str
    dtype: str
    size: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """NaN does not pass."""
        return self.error <= self.tolerance


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand `kernels`."""
    parser = subparsers.add_parser("kernels", help="compare the token kernels of this machine with float64")
    parser.add_argument(
        "--backend", help="one back-end; default: each that is there. triton without a GPU: set TRITON_INTERPRET=1"
    )
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    checks = list(run_checks(options.backend))
    _print(checks)
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} passed, {failed} failed")
    return 1 if failed else 0


def run_checks(backend: str | None = None) -> Iterator[Check]:
    """Every kernel, size and dtype on `backend`, or on each that is there. Raises UserError where it is not."""
    names = available_backends() if backend is None else [backend]
    for name in names:
        dtypes = DTYPES.get(name, (torch.float32, torch.bfloat16))
        device = device_of(name)
        try:
            choose_backend(name, torch.zeros(1, 1, dtype=dtypes[-1], device=device))
        except (BackendUnavailable, ValueError) as error:
            raise UserError(str(error)) from error
        with torch.device(device):
            for dtype in dtypes:
                yield from _checks(name, dtype)


def device_of(backend: str) -> str:
    """Where a back-end is checked: on the GPU where it runs there."""
    return "cuda" if backend in GPU_BACKENDS and torch.cuda.is_available() else "cpu"


def _checks(backend: str, dtype: torch.dtype) -> Iterator[Check]:
    for size in _feasible(backend, SIZES):
        yield from _judge("token_logprob", backend, dtype, size, _token_logprob(backend, dtype, size))
    for size in _feasible(backend, HEAD_SIZES):
        yield from _judge("linear_token_logprob", backend, dtype, size, _linear_token_logprob(backend, dtype, size))
    for loss, config in LOSSES.items():
        for size in _feasible(backend, LOSS_SIZES):
            yield from _judge(f"fused_policy_loss {loss}", backend, dtype, size, _fused(backend, dtype, size, config))


def _feasible(backend: str, sizes: tuple[Size, ...]) -> list[Size]:
    return [size for size in sizes if size.tokens <= INTERPRETER_TOKENS or not _interpreted(backend)]


def _interpreted(backend: str) -> bool:
    return backend == "triton" and device_of(backend) == "cpu"


@dataclass(frozen=True)
class _Result:
    """kind: which tolerance. exact, scale float64: the scale has the shape of `exact` or spreads over it."""

    name: str
    kind: str
    found: Tensor
    exact: Tensor
    scale: Tensor

    @staticmethod
    def value(name: str, found: Tensor, exact: Tensor, kind: str = "value") -> "_Result":
        return _Result(name, kind, found, exact.detach(), exact.detach().abs())

    @staticmethod
    def gradient(name: str, found: Tensor, exact: Tensor) -> "_Result":
        return _Result(name, "gradient", found, exact, exact.abs().amax(1, keepdim=True))

    @staticmethod
    def product(name: str, found: Tensor, left: Tensor, right: Tensor) -> "_Result":
        left, right = left.double(), right.double()
        return _Result(name, "product", found, left @ right, left.abs() @ right.abs())


def _judge(kernel: str, backend: str, dtype: torch.dtype, size: Size, results: list[_Result]) -> Iterator[Check]:
    label = str(dtype).removeprefix("torch.")
    for result in results:
        error = (result.found.detach().double() - result.exact).abs() / (1 + result.scale)
        largest = float(error.max()) if error.numel() else 0.0
        tolerance = TOLERANCES[dtype][result.kind]
        if _interpreted(backend) and (result.kind, dtype) == ("gradient", torch.bfloat16):
            tolerance = TRUNCATED
        yield Check(kernel, result.name, backend, label, str(size), largest, tolerance)


def _logits(dtype: torch.dtype, size: Size) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, padding of which would win every maximum; targets; gradients of log-probs and entropies."""
    generator = _generator(size.tokens)
    logits = 2 * torch.randn(size.tokens, size.width, generator=generator, dtype=torch.float64) + size.offset
    logits[:, size.vocab :] = 1e3
    targets = torch.randint(size.vocab, (size.tokens,), generator=generator)
    return logits.to(dtype), targets, torch.randn(2, size.tokens, generator=generator, dtype=torch.float64)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def _dense(logits: Tensor, targets: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """What one writes in torch, over logits [T, width] float64."""
    logp_all = torch.log_softmax(logits[:, :vocab] / TEMPERATURE, 1)
    return logp_all.gather(1, targets[:, None])[:, 0], -(logp_all.exp() * logp_all).sum(1)


def _weighted(grads: Tensor, logp: Tensor, entropy: Tensor) -> Tensor:
    return (grads[0].to(logp.dtype) * logp + grads[1].to(logp.dtype) * entropy).sum()


def _token_logprob(backend: str, dtype: torch.dtype, size: Size) -> list[_Result]:
    logits, targets, grads = _logits(dtype, size)
    exact_logits = logits.double().requires_grad_()
    exact = _dense(exact_logits, targets, size.vocab)
    _weighted(grads, *exact).backward()
    own = logits.requires_grad_()
    options = {"temperature": TEMPERATURE, "vocab": size.vocab, "backend": backend}
    found = token_logprob(own, targets, with_entropy=True, **options)
    _weighted(grads, *found).backward()
    return [
        _Result.value("logp", found[0], exact[0]),
        _Result.value("entropy", found[1], exact[1]),
        _Result.gradient("d logits", own.grad, exact_logits.grad),
    ]


def _linear_token_logprob(backend: str, dtype: torch.dtype, size: Size) -> list[_Result]:
    """The exact values are of the logits as the head's product rounds them."""
    _, targets, grads = _logits(dtype, size)
    generator = _generator(1)
    hidden = torch.randn(size.tokens, 8, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(size.width, 8, generator=generator, dtype=torch.float64).to(dtype)
    exact_logits = (hidden @ weight.T).double().requires_grad_()
    exact = _dense(exact_logits, targets, size.vocab)
    _weighted(grads, *exact).backward()
    hidden.requires_grad_()
    weight.requires_grad_()
    options = {"temperature": TEMPERATURE, "vocab": size.vocab, "backend": backend}
    found = linear_token_logprob(hidden, weight, targets, with_entropy=True, chunk_tokens=10, **options)
    _weighted(grads, *found).backward()
    return [
        _Result.value("logp", found[0], exact[0], kind="product"),  # the product of a chunk may round in another way
        _Result.value("entropy", found[1], exact[1], kind="product"),
        _Result.product("d hidden", hidden.grad, exact_logits.grad, weight.detach()),
        _Result.product("d weight", weight.grad, exact_logits.grad.T, hidden.detach()),
    ]


def _fused(backend: str, dtype: torch.dtype, size: Size, config: PolicyLossConfig) -> list[_Result]:
    logits, targets, noise = _logits(dtype, size)
    mask = torch.arange(size.tokens) % 5 != 0
    exact_logits = logits.double().requires_grad_()
    logp, entropy = _dense(exact_logits, targets, size.vocab)
    old_logp, advantages = (logp.detach() + 0.3 * noise[0]).float(), noise[1].float()
    exact = policy_loss(
        config,
        logp=logp,
        old_logp=old_logp.double(),
        advantages=advantages.double(),
        loss_mask=mask,
        cu_seqlens=torch.tensor([0, size.tokens]),
        entropy=entropy,
    )
    exact.loss.backward()
    own, weights = logits.requires_grad_(), mask.double() / mask.sum()
    found = fused_policy_loss(
        own,
        targets,
        config,
        old_logp=old_logp,
        advantages=advantages,
        weights=weights,
        entropy_weights=config.entropy_coef * weights,
        loss_mask=mask,
        temperature=TEMPERATURE,
        vocab=size.vocab,
        backend=backend,
    )
    found.loss.backward()
    return [
        _Result.value("loss", found.loss, exact.loss, kind="loss"),
        _Result.value("logp", found.logp[mask], logp[mask]),
        _Result.gradient("d logits", own.grad, exact_logits.grad),
    ]


def _print(checks: list[Check]) -> None:
    """A row for each kernel, back-end, dtype and size: the result that comes closest to its tolerance."""
    table = Table(title="kernels against dense float64; errors are relative to 1 + the size of the result")
    for name in ("kernel", "back-end", "dtype", "T x V", "worst result"):
        table.add_column(name)
    for name in ("max error", "tolerance"):
        table.add_column(name, justify="right")
    table.add_column("pass")
    cases: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        cases.setdefault((check.kernel, check.backend, check.dtype, check.size), []).append(check)
    for case, results in cases.items():
        worst = max(results, key=lambda check: (not check.passed, check.error / check.tolerance))
        verdict = "yes" if worst.passed else "[bold red]NO[/]"
        table.add_row(*case, worst.result, f"{worst.error:.1e}", f"{worst.tolerance:.1e}", verdict)
    Console(width=120).print(table)
