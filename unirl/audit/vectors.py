"""`python -m unirl.audit vectors DIR`: conformance vectors against the product's own functions."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.algorithms import gae, normalize, overlong_penalty, policy_loss, policy_loss_derivative, step_advantages
from unirl.errors import UserError
from unirl.kernels import BackendUnavailable, available_backends, token_logprob

TOLERANCES = {torch.float64: (1e-9, 1e-9), torch.float32: (1e-5, 1e-6)}
"""rtol and atol by the dtype that a case is computed in."""

_DTYPES = {
    "cu_seqlens": torch.int64,
    "group_ids": torch.int64,
    "lengths": torch.int64,
    "loss_mask": torch.bool,
    "steps": torch.int64,
    "targets": torch.int64,
    "truncated": torch.bool,
    "turn_ids": torch.int64,
}

Inputs = dict[str, torch.Tensor]
Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """One case in one dtype (and on one back-end). problem: what is wrong, None where all is right."""

    case: str
    setting: str
    problem: str | None


def add_parser(subparsers: Any) -> None:
    """Declare the subcommand `vectors`."""
    parser = subparsers.add_parser("vectors", help="run conformance vectors through losses, advantages and kernels")
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of *.json files of cases")
    parser.add_argument("--backend", help="kernel back-end of the token_logprob cases; default: each that is there")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    passed = failed = 0
    for outcome in run_vectors(options.directory, options.backend):
        if outcome.problem is None:
            passed += 1
        else:
            failed += 1
            print(f"{outcome.case} [{outcome.setting}]: {outcome.problem}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def run_vectors(directory: Path, backend: str | None = None) -> Iterator[Outcome]:
    """Every case of every *.json file of `directory`, in float64 and float32.

    `backend`: kernel back-end of the token_logprob cases; None takes each that is there. One that does not compute in
    float64 is run in float32 alone. Raises UserError where there are no vectors or a file does not hold any.
    """
    for case in _read_cases(directory):
        backends = [backend] if backend else available_backends()
        for dtype in TOLERANCES:
            for name in backends if case["kind"] == "token_logprob" else [None]:
                setting = ", ".join(part for part in (str(dtype).removeprefix("torch."), name) if part)
                try:
                    problem = _check(case, dtype, name)
                except BackendUnavailable as error:
                    if dtype == torch.float64:
                        continue
                    problem = str(error)
                yield Outcome(case["name"], setting, problem)


def _read_cases(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("*.json"))
    if not files:
        raise UserError(f"{directory}: no *.json files there; give the folder that holds the vectors")
    cases = []
    for file in files:
        try:
            found = json.loads(file.read_text())
        except json.JSONDecodeError as error:
            raise UserError(f"{file}: not JSON: {error}") from error
        keys = {"name", "kind", "config", "inputs", "expected"}
        if not isinstance(found, list) or not all(isinstance(case, dict) and keys <= case.keys() for case in found):
            raise UserError(f"{file}: expected a list of cases with {', '.join(sorted(keys))}")
        cases += found
    return cases


def _check(case: dict[str, Any], dtype: torch.dtype, backend: str | None) -> str | None:
    """What is wrong with a case, or None. An error that the product raises for its inputs is a failure.

    An input that is null is left out; what the case expects nothing of is not compared.
    """
    compute = _KINDS.get(case["kind"])
    if compute is None:
        return f"unknown kind {case['kind']!r}, expected one of {', '.join(_KINDS)}"
    inputs = {name: _tensor(name, value, dtype) for name, value in case["inputs"].items() if value is not None}
    try:
        found = compute(case["config"], inputs, backend)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    expected = case["expected"]
    if not expected or (unknown := sorted(expected.keys() - found.keys())):
        return f"expected: found {unknown if expected else 'nothing'}, but {case['kind']} gives {', '.join(found)}"
    for name, value in found.items():
        expected_name = name.removesuffix(_CLOSED_FORM)
        if expected_name not in expected:
            continue
        if problem := _difference(name, value, expected[expected_name], dtype):
            return problem
    return None


def _tensor(name: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    """null stands for a value that is not finite."""
    if name in _DTYPES:
        return torch.tensor(value, dtype=_DTYPES[name])
    return torch.tensor(_without_null(value), dtype=dtype)


def _without_null(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null(member) for member in value]
    return float("nan") if value is None else value


def _difference(name: str, found: torch.Tensor, expected: Any, dtype: torch.dtype) -> str | None:
    """The first place where `found` is not `expected`, and both values."""
    target = torch.tensor(_without_null(expected), dtype=torch.float64)
    if found.shape != target.shape:
        return f"{name}: found shape {tuple(found.shape)}, expected {tuple(target.shape)}"
    rtol, atol = TOLERANCES[dtype]
    wrong = ~torch.isclose(found.detach().double(), target, rtol=rtol, atol=atol, equal_nan=True)
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    place = f"{name}[{', '.join(map(str, at))}]" if at else name
    return f"{place}: found {found[at].item()!r}, expected {target[at].item()!r}"


_CLOSED_FORM = " in closed form"


def _policy_loss(config: dict, inputs: Inputs, backend: str | None) -> Fields:
    inputs["logp"].requires_grad_()
    loss = policy_loss(config, **inputs).loss
    loss.backward()
    derivative = policy_loss_derivative(config, **{name: value for name, value in inputs.items() if name != "entropy"})
    return {"loss": loss, "grad_logp": inputs["logp"].grad, f"grad_logp{_CLOSED_FORM}": derivative}


def _normalize(config: dict, inputs: Inputs, backend: str | None) -> Fields:
    return {"values": normalize(inputs["values"], inputs["group_ids"], config)}


def _gae(config: dict, inputs: Inputs, backend: str | None) -> Fields:
    return dict(zip(("advantages", "returns"), gae(config, **inputs), strict=True))


def _overlong(config: dict, inputs: Inputs, backend: str | None) -> Fields:
    return {"rewards": overlong_penalty(config, **inputs)}


def _step_advantage(config: dict, inputs: Inputs, backend: str | None) -> Fields:
    return {"values": step_advantages(config, **inputs)}


def _token_logprob(config: dict, inputs: Inputs, backend: str | None) -> Fields:
    logp, entropy = token_logprob(**inputs, **config, with_entropy=True, backend=backend)
    return {"logp": logp, "entropy": entropy}


_KINDS: dict[str, Callable[[dict, Inputs, str | None], Fields]] = {
    "policy_loss": _policy_loss,
    "normalize": _normalize,
    "gae": _gae,
    "overlong": _overlong,
    "step_advantage": _step_advantage,
    "token_logprob": _token_logprob,
}
