"""Faults that trainers in parallel have had, as small inputs on two real ranks: a vocabulary that does not divide,
denominators of a rank, masked samples, padding, context-parallel chunk edges; and the same bits each time.

All layouts run on one group of processes.
"""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from unirl.algorithms import PolicyLossConfig
from unirl.audit.parallel.batches import make_part, make_parts
from unirl.audit.parallel.cases import write_model
from unirl.audit.parallel.compare import TOLERANCES, compare
from unirl.audit.parallel.train import ParallelCase, train_jobs
from unirl.config.schema import ModelConfig, ParallelConfig, StackConfig
from unirl.types import Part

VOCAB, GPT2_VOCAB = 131, 50_257
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
DP, TP, CP = ParallelConfig(), ParallelConfig(tp=2), ParallelConfig(cp=2)
BITS = ParallelConfig(tp=2, sequence_parallel=True, use_distributed_optimizer=True, deterministic=True)
NORM = {"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 16}
TERMS = {
    "KL": {"loss": "ppo", "kl_coef": 0.1},
    "entropy": {"loss": "ppo", "entropy_coef": 0.01},
    "DRPO penalty": {"loss": "drpo", "drpo_epsilon": 0.01},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory) -> dict[str, tuple[ParallelCase, ParallelConfig]]:
    """With the layout of two ranks that each is trained under."""
    root = tmp_path_factory.mktemp("models")
    small = write_model(Qwen3Config(vocab_size=VOCAB, tie_word_embeddings=True, **SIZES), root / "small")
    gpt2 = write_model(LlamaConfig(vocab_size=GPT2_VOCAB, tie_word_embeddings=False, **SIZES), root / "gpt2")

    def case(parts: list[Part], keys: dict, model=small, dtype="float32") -> ParallelCase:
        stack = StackConfig(max_grad_norm=0.05)
        return ParallelCase("", ModelConfig(path=model, dtype=dtype), PolicyLossConfig(**keys), parts, 64, stack)

    uneven = [make_part([(4, (3, 13))], VOCAB)]
    five = [make_part([(3, (7, 4)), (2, (9,))], GPT2_VOCAB, seed=seed) for seed in range(5)]
    return {
        "vocabulary": (case(five, {"loss": "ppo", "entropy_coef": 0.01}, gpt2), TP),
        **{name: (case(uneven, keys), DP) for name, keys in TERMS.items()},
        "masked": (case([masked_part()], {"loss": "ppo", "loss_agg_mode": "seq-mean-token-mean"}), DP),
        "padded": (case([make_part([(2, (3, 1)), (1, (4,))], VOCAB)], {"loss": "ppo", **NORM}), CP),
        "edges": (case([make_part([(1, (31,)), (1, (15, 7))], VOCAB)], {"loss": "ppo"}), CP),
        "bits": (case(make_parts(VOCAB), {"loss": "ppo", "entropy_coef": 0.01}, dtype="bfloat16"), BITS),
    }


def masked_part() -> Part:
    """A sample of four generated tokens one of which is valid, and one without any that is."""
    part = make_part([(3, (4, 4))], VOCAB)
    log_probs = torch.full_like(part.text.log_probs, math.nan)
    log_probs[3] = 0.1
    return replace(part, text=replace(part.text, log_probs=log_probs))


@pytest.fixture(scope="module")
def on_two_ranks(cases):
    jobs = [*cases.items(), ("bits again", cases["bits"])]
    outcomes = train_jobs([job for _, job in jobs], 2, timeout_s=300)
    return {name: outcome for (name, _), outcome in zip(jobs, outcomes, strict=True)}


@pytest.mark.parametrize("name", ["vocabulary", *TERMS, "masked", "padded", "edges", "bits"])
def test_two_ranks_do_what_one_does(cases, on_two_ranks, name):
    case, _ = cases[name]
    (alone,) = train_jobs([(case, ParallelConfig())], 1)
    differences = compare(on_two_ranks[name], alone, TOLERANCES[case.model.dtype])
    assert {quantity: found for quantity, found in differences.items() if not found.passed} == {}


def test_a_masked_sample_is_as_if_absent(cases, on_two_ranks):
    """On another rank, too, it adds nothing to the denominator."""
    case, _ = cases["masked"]
    (first,) = case.parts
    (alone,) = train_jobs([(replace(case, parts=[first.select(torch.tensor([0]))]), ParallelConfig())], 1)
    found = on_two_ranks["masked"]
    assert found.metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], abs=1e-6)
    assert found.metrics[0]["loss"] != 0
    for name, gradient in alone.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, rtol=1e-5, atol=1e-7)


def test_every_token_at_a_chunk_edge_has_its_own_log_prob(cases, on_two_ranks):
    """Chunks of eight tokens and of four: no label is shifted over an edge, none is lost, none counted twice."""
    case, _ = cases["edges"]
    (alone,) = train_jobs([(case, ParallelConfig())], 1)
    found, expected = on_two_ranks["edges"].token_values["logp"], alone.token_values["logp"]
    assert int(found.isfinite().sum()) == 31 + 15 + 7
    for edge in (8, 16, 24, 32 + 4, 32 + 8, 32 + 12):
        assert found[edge - 1 : edge + 2] == pytest.approx(expected[edge - 1 : edge + 2], abs=1e-5)


def test_the_same_layout_gives_the_same_bits(on_two_ranks):
    first, second = on_two_ranks["bits"], on_two_ranks["bits again"]
    assert first.metrics == second.metrics
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name])
