"""Every layout of ranks gives what one process gives: log-probs, losses, metrics, gradients, weights after three steps.

All layouts of two ranks run on one group of real processes, all layouts of four on another.
"""

import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.train.conftest import make_part
from unirl.algorithms import PolicyLossConfig, ValueLossConfig
from unirl.audit.parallel import compare
from unirl.audit.parallel_run import ParallelCase, train_jobs
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
LAYOUTS = {
    2: {
        "tp2": {"tp": 2},
        "tp2-sp": {"tp": 2, "sequence_parallel": True},
        "pp2": {"pp": 2},
        "pp2-vpp2": {"pp": 2, "vpp": 2},
        "cp2": {"cp": 2},
        "dp2": {"overlap_grad_reduce": True},
        "dp2-distributed-optimizer": {"use_distributed_optimizer": True},
    },
    4: {
        "cp4": {"cp": 4},
        "tp2-pp2": {"tp": 2, "pp": 2},
        "tp2-cp2-sp": {"tp": 2, "cp": 2, "sequence_parallel": True},
        "pp2-dp2": {"pp": 2, "use_distributed_optimizer": True},
        "tp4": {"tp": 4},
    },
}
"""By the number of ranks."""
EXPERTS = {"ep2": {"ep": 2}, "ep2-tp2-sp": {"ep": 2, "tp": 2, "sequence_parallel": True}}
BITS = {"tp": 2, "sequence_parallel": True, "use_distributed_optimizer": True, "deterministic": True}


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


PPO = PolicyLossConfig(loss="ppo", entropy_coef=0.01)


def dense_cases(make_case, sizes: dict) -> list[ParallelCase]:
    """Fused and separate kernels, token and sequence losses, extra terms, shared prompts, recomputation, a critic."""
    untied = "llama-untied-4-kv" if sizes.get("tp") == 4 else "llama-untied"
    gspo = PolicyLossConfig(loss="ppo", importance_sampling_level="sequence", loss_agg_mode="seq-mean-token-mean")
    return [
        make_case("ppo, entropy bonus, fused", "qwen3-tied", PPO),
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
def jobs(make_case):
    """(case, sizes) by the number of ranks and the name of the layout; cases with experts, and one that runs twice."""
    found = {
        ranks: {name: [(case, sizes) for case in dense_cases(make_case, sizes)] for name, sizes in layouts.items()}
        for ranks, layouts in LAYOUTS.items()
    }
    found[2] |= {name: [(make_case("experts", "qwen3-moe", PPO), sizes)] for name, sizes in EXPERTS.items()}
    found[2]["twice"] = [(make_case("ppo, bfloat16", "qwen3-tied", PPO, dtype="bfloat16"), BITS)] * 2
    return found


@pytest.fixture(scope="module")
def train(jobs):
    """train(ranks, layout) -> (cases, their outcomes under the layout, and in one process); each made once."""
    alone, together = {}, {}

    def in_one_process(case: ParallelCase):
        key = case.name, case.model.path
        if key not in alone:
            (alone[key],) = train_jobs([(case, ParallelConfig())], 1)
        return alone[key]

    def train(ranks: int, layout: str):
        if ranks not in together:
            every = [(case, ParallelConfig(**sizes)) for some in jobs[ranks].values() for case, sizes in some]
            outcomes = iter(train_jobs(every, ranks, timeout_s=540))
            together[ranks] = {name: [next(outcomes) for _ in some] for name, some in jobs[ranks].items()}
        cases = [case for case, _ in jobs[ranks][layout]]
        return cases, together[ranks][layout], [in_one_process(case) for case in cases]

    return train


@pytest.mark.parametrize(("ranks", "layout"), [(ranks, name) for ranks, layouts in LAYOUTS.items() for name in layouts])
def test_a_layout_changes_nothing(train, ranks, layout):
    assert_same(*train(ranks, layout))


@pytest.mark.parametrize("layout", EXPERTS)
def test_a_layout_changes_nothing_for_experts(train, layout):
    assert_same(*train(2, layout))


def assert_same(cases, found, expected):
    for case, ours, theirs in zip(cases, found, expected, strict=True):
        differences = compare(ours, theirs)
        assert differences.token_values <= 1e-5, case.name
        assert max(differences.metrics.values()) <= 1e-5, (case.name, differences.metrics)
        assert differences.grad_norm <= 1e-5, case.name
        assert differences.gradients <= 1e-5, (case.name, differences.worst_gradient)
        assert differences.weights <= 3e-6, case.name


def test_cases_are_hard_enough(train):
    """Gradients everywhere, ratios beyond the clip, gradients clipped."""
    _, _, outcomes = train(2, "tp2")
    for outcome in outcomes:
        assert all(gradient.abs().max() > 0 for gradient in outcome.gradients.values())
        assert all(step["grad_norm"] > 0.05 for step in outcome.metrics)
    assert 0.05 < outcomes[0].metrics[0]["clip_ratio"] < 0.95


def test_the_same_layout_gives_the_same_bits_and_bfloat16_stays_close(train):
    _, (first, second), (expected, _) = train(2, "twice")
    assert first.metrics == second.metrics
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name])
        assert (weight - expected.weights[name]).abs().max() <= 0.01 * expected.weights[name].abs().max()
    assert compare(first, expected).token_values <= 0.05
