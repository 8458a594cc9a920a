"""The loss formulas of the kernels, C++ and plain torch, against unirl.algorithms in float64."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tests.kernels.policy import CONFIGS, log_probs, surrogate
from unirl.algorithms import PolicyLossConfig
from unirl.algorithms.validation import as_config
from unirl.kernels import LossSpec, backends, fused_loss_refusal
from unirl.kernels.token_losses import TokenLosses

VECTORS = [
    case
    for case in json.loads((Path(__file__).parents[1] / "vectors" / "policy_loss.json").read_text())
    if case["config"].get("importance_sampling_level", "token") == "token"
]


def losses_of(backend: str, config: PolicyLossConfig, logp, old_logp, anchor_logp, advantages) -> TokenLosses:
    terms = torch.stack([old_logp, anchor_logp, advantages, *torch.zeros(2, logp.numel(), dtype=torch.float64)])
    module = backends.choose_backend(backend, torch.zeros(0, 1))
    return module.token_losses(LossSpec.of(config), logp, terms)


def check(backend: str, config: PolicyLossConfig, *tokens: torch.Tensor) -> None:
    found, expected = losses_of(backend, config, *tokens), surrogate(config, *tokens)
    for value, oracle in (
        (found.ratio, expected.ratio),
        (found.loss, expected.loss),
        (found.slope, expected.derivative),
        (found.slope, expected.closed_form),
    ):
        torch.testing.assert_close(value, oracle, rtol=1e-13, atol=1e-13)
    assert torch.equal(found.upper, expected.upper)
    assert torch.equal(found.lower, expected.lower)


@pytest.mark.parametrize("name", CONFIGS)
def test_random_tokens(backend, name):
    tokens = log_probs(500)
    check(backend, CONFIGS[name], *tokens)
    found = losses_of(backend, CONFIGS[name], *tokens)
    flags = found.upper.sum(), found.lower.sum()
    assert all(flags) or name == "drpo-paper"  # the case must reach both ends: 12.5 is out of a probability's reach
    assert bool(found.capped.any()) == (name == "ppo-dual-clip")


@pytest.mark.parametrize("name", CONFIGS)
def test_far_apart_policies(backend, name):
    """Log ratios beyond 20 are clamped and have no slope, but for the losses that do not go through the ratio."""
    logp = torch.tensor([-0.1, -30.0, -21.0, -0.5, -40.0, -1.0], dtype=torch.float64)
    anchor = torch.tensor([-30.0, -0.1, -0.5, -21.0, -1.0, -1.0], dtype=torch.float64)
    for sign in (1.0, -1.0):
        check(backend, CONFIGS[name], logp, anchor, anchor, sign * torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_conformance_vectors(backend, case):
    config = as_config(PolicyLossConfig, case["config"])
    inputs = {name: torch.tensor(case["inputs"][name], dtype=torch.float64) for name in ("logp", "old_logp")}
    advantages = torch.tensor(case["inputs"]["advantages"], dtype=torch.float64)
    anchor = torch.tensor(case["inputs"].get("prox_logp", case["inputs"]["old_logp"]), dtype=torch.float64)
    check(backend, config, inputs["logp"], inputs["old_logp"], anchor, advantages)


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), float("inf")])
def test_a_log_prob_that_is_not_finite_takes_no_part(backend, value):
    logp, *tokens = log_probs(3)
    logp[1] = value
    found = losses_of(backend, CONFIGS["drpo"], logp, *tokens)
    assert [float(getattr(found, f.name)[1]) for f in fields(found)] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert all(torch.isfinite(getattr(found, f.name)).all() for f in fields(found))


def test_what_is_refused_and_why():
    sequence = PolicyLossConfig(loss="ppo", importance_sampling_level="sequence")
    assert "its whole sequence" in fused_loss_refusal(sequence)
    with pytest.raises(ValueError, match=r"importance_sampling_level=sequence.*use token_logprob and policy_loss"):
        LossSpec.of(sequence)
    assert "kl_coef=0.1" in fused_loss_refusal(PolicyLossConfig(kl_coef=0.1))
    assert all(fused_loss_refusal(config) is None for config in CONFIGS.values())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"loss": "grpo"}, "found 'grpo', expected one of ppo, drpo"),
        ({"loss": "drpo", "epsilon": 0.0}, "epsilon: found 0.0"),
        ({"loss": "sapo", "tau_neg": float("nan")}, "tau_neg: found nan"),
        ({"loss": "ppo", "lowest": 1.2, "highest": 0.8}, "found 1.2 to 0.8"),
    ],
)
def test_a_spec_that_is_none(values, words):
    with pytest.raises(ValueError, match=words):
        LossSpec(**values)
