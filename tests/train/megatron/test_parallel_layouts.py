"""Every layout of ranks gives what one process gives: log-probs, losses, metrics, gradients, weights after three steps.

Each layout is one group of real processes that trains all cases.
"""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.train.conftest import make_part
from unirl.algorithms import PolicyLossConfig, ValueLossConfig
from unirl.audit.parallel import compare
from unirl.audit.parallel_run import ParallelCase, train_layout
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.types import Part

VOCAB = 131
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}
MODELS = {
    "qwen3-tied": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**_SIZES | {"num_key_value_heads": 2}, tie_word_embeddings=False),
    "llama-untied-4-kv": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
}
DENSE = {
    "tp2": ({"tp": 2}, 2),
    "tp2-sp": ({"tp": 2, "sequence_parallel": True}, 2),
    "pp2": ({"pp": 2}, 2),
    "pp2-vpp2": ({"pp": 2, "vpp": 2}, 2),
    "cp2": ({"cp": 2}, 2),
    "cp4": ({"cp": 4}, 4),
    "dp2": ({"overlap_grad_reduce": True}, 2),
    "dp2-distributed-optimizer": ({"use_distributed_optimizer": True}, 2),
    "tp2-pp2": ({"tp": 2, "pp": 2}, 4),
    "tp2-cp2-sp": ({"tp": 2, "cp": 2, "sequence_parallel": True}, 4),
    "pp2-dp2": ({"pp": 2, "use_distributed_optimizer": True}, 4),
    "tp4": ({"tp": 4}, 4),
}
EXPERTS = {
    "ep2": ({"ep": 2}, 2),
    "ep2-tp2-sp": ({"ep": 2, "tp": 2, "sequence_parallel": True}, 2),
}


def make_batch(shapes: list[tuple[int, tuple[int, ...]]], seed: int) -> Part:
    """Groups of (prompt tokens, response tokens of each sample), with all that a policy and a critic learn from."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    part = make_part([(ids(prompt), [ids(count) for count in counts]) for prompt, counts in shapes], seed=seed)

    def noise() -> torch.Tensor:
        return 0.3 * torch.randn(part.text.tokens.numel(), generator=generator)

    # The models are close to uniform, so ratios lie on both sides of the clip.
    near = torch.where(part.text.loss_mask, noise() - math.log(VOCAB), 0.0)
    return replace(
        part, text=replace(part.text, log_probs=near), ref_logp=near + noise(), values=noise(), returns=noise()
    )


PARTS = [
    make_batch([(5, (3, 7, 1)), (1, (12,)), (9, (4, 4, 4, 2)), (3, (6,)), (20, (8, 9))], seed=1),
    make_batch([(2, (30, 3)), (11, (2, 5))], seed=2),
    make_batch([(4, (9, 2))], seed=3),  # one prompt for two replicas: with prompts shared, one of them has nothing
]


@pytest.fixture(scope="module")
def make_case(tmp_path_factory):
    folders = {}

    def folder_of(model: str) -> str:
        if model not in folders:
            torch.manual_seed(0)
            reference = AutoModelForCausalLM.from_config(MODELS[model]())
            with torch.no_grad():
                for parameter in reference.parameters():
                    if parameter.dim() == 1:
                        parameter.add_(0.2 * torch.randn_like(parameter))
                    else:
                        parameter.normal_(0, 0.05)
            folders[model] = str(tmp_path_factory.mktemp(model))
            reference.save_pretrained(folders[model])
        return folders[model]

    def make(name: str, model: str, loss, *, dtype: str = "float32", **stack) -> ParallelCase:
        return ParallelCase(
            name,
            ModelConfig(path=folder_of(model), dtype=dtype),
            loss,
            PARTS,
            OptimizerConfig(lr=1e-4, weight_decay=0.1),
            StackConfig(**{"micro_batch_tokens": 72, "max_grad_norm": 0.05} | stack),
            temperature=0.8,
        )

    return make


def dense_cases(make_case, untied: str = "llama-untied") -> list[ParallelCase]:
    """Fused and separate kernels, token and sequence losses, extra terms, shared prompts, recomputation, a critic."""
    gspo = PolicyLossConfig(loss="ppo", importance_sampling_level="sequence", loss_agg_mode="seq-mean-token-mean")
    return [
        make_case("ppo, entropy bonus, fused", "qwen3-tied", PolicyLossConfig(loss="ppo", entropy_coef=0.01)),
        make_case("gspo, all recomputed", untied, gspo, recompute="full"),
        make_case(
            "drpo with a KL term, shared prompts, chunked logits",
            "qwen3-tied",
            PolicyLossConfig(loss="drpo", kl_coef=0.1),
            share_prompts=True,
            logits_chunk_tokens=3,
            recompute="selective",
        ),
        make_case("critic", "qwen3-tied", ValueLossConfig()),
    ]


@pytest.fixture(scope="module")
def in_one_process():
    """The outcomes of cases in this process, made once."""
    known = {}

    def outcomes(cases: list[ParallelCase]) -> list:
        for case in cases:
            key = case.name, case.model.path
            if key not in known:
                known[key] = train_layout([case], ParallelConfig(), 1)[0]
        return [known[case.name, case.model.path] for case in cases]

    return outcomes


def assert_same(cases, found, expected):
    for case, ours, theirs in zip(cases, found, expected, strict=True):
        differences = compare(ours, theirs)
        assert differences.token_values <= 1e-5, case.name
        assert max(differences.metrics.values()) <= 1e-5, (case.name, differences.metrics)
        assert differences.grad_norm <= 1e-5, case.name
        assert differences.gradients <= 1e-5, (case.name, differences.worst_gradient)
        assert differences.weights <= 3e-6, case.name


@pytest.mark.parametrize("layout", DENSE)
def test_a_layout_changes_nothing(make_case, in_one_process, layout):
    sizes, ranks = DENSE[layout]
    cases = dense_cases(make_case, "llama-untied-4-kv" if sizes.get("tp") == 4 else "llama-untied")
    expected = in_one_process(cases)
    assert_same(cases, train_layout(cases, ParallelConfig(**sizes), ranks, timeout_s=240), expected)


@pytest.mark.parametrize("layout", EXPERTS)
def test_a_layout_changes_nothing_for_experts(make_case, in_one_process, layout):
    sizes, ranks = EXPERTS[layout]
    cases = [make_case("experts", "qwen3-moe", PolicyLossConfig(loss="ppo", entropy_coef=0.01))]
    expected = in_one_process(cases)
    assert_same(cases, train_layout(cases, ParallelConfig(**sizes), ranks, timeout_s=240), expected)


def test_cases_are_hard_enough(make_case, in_one_process):
    """Gradients everywhere, ratios beyond the clip, gradients clipped."""
    outcomes = in_one_process(dense_cases(make_case))
    for outcome in outcomes:
        assert all(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
        assert all(step["grad_norm"] > 0.05 for step in outcome.metrics)
    assert 0.05 < outcomes[0].metrics[0]["clip_ratio"] < 0.95


def test_the_same_layout_gives_the_same_bits_and_bfloat16_stays_close(make_case, in_one_process):
    ppo = PolicyLossConfig(loss="ppo", entropy_coef=0.01)
    cases = [make_case("ppo, bfloat16", "qwen3-tied", ppo, dtype="bfloat16") for _ in range(2)]
    (expected,) = in_one_process(cases[:1])
    layout = ParallelConfig(tp=2, sequence_parallel=True, use_distributed_optimizer=True, deterministic=True)
    first, second = train_layout(cases, layout, 2, timeout_s=240)
    assert first.metrics == second.metrics
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name])
        assert (weight - expected.weights[name]).abs().max() <= 0.01 * expected.weights[name].abs().max()
    assert compare(first, expected).token_values <= 0.05
