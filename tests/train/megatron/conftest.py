"""Small random policies of each family, as Hugging Face folders, and actors on them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from tests.train.conftest import make_part
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.train.megatron.actor import MegatronActor
from unirl.train.packing import MicroBatch, plan_micro_batches

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FAMILIES = {
    "qwen3-tied": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3-untied": lambda: Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=False),
    "qwen2-tied": lambda: Qwen2Config(**_SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama3-untied": lambda: LlamaConfig(**_SIZES, tie_word_embeddings=False, rope_parameters=_LLAMA3_ROPE),
    "qwen3-moe": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True),
    "qwen3-moe-not-normalized": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=False),
    # The proportions of SmolLM2-135M: 9 heads, 3 KV heads, tied.
    "llama-tied-9-heads": lambda: LlamaConfig(
        **_SIZES | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
    ),
}


def make_reference(name: str, seed: int = 0) -> PreTrainedModel:
    """A transformers model whose weights are all random, norms and biases too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15)
    return model.eval()


def reference_gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """By the names in a Hugging Face folder, where each expert has tensors of its own; transformers fuses them."""
    gradients = {}
    for name, parameter in model.named_parameters():
        experts, found, fused = name.partition(".mlp.experts.")
        if not found:
            gradients[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            prefix = f"{experts}.mlp.experts.{expert}"
            if fused == "down_proj":
                gradients[f"{prefix}.down_proj.weight"] = gradient
            else:
                gate, up = gradient.chunk(2)
                gradients |= {f"{prefix}.gate_proj.weight": gate, f"{prefix}.up_proj.weight": up}
    return gradients


def make_batches(
    *, token_budget: int = 10_000, share_prompts: bool = False, seed: int = 0, **shape: int
) -> list[MicroBatch]:
    """Eleven uneven samples in five groups, one prompt of a single token, responses of 1 to 12 tokens.

    shape: fields of `ParallelShape`.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    shapes = [(5, (3, 7, 1)), (1, (12,)), (9, (4, 4, 4, 2)), (3, (6,)), (20, (8, 9))]
    part = make_part([(ids(prompt), [ids(count) for count in counts]) for prompt, counts in shapes], seed=seed)
    samples = torch.arange(len(part))
    return plan_micro_batches(part, samples, token_budget=token_budget, share_prompts=share_prompts, **shape)


def sample_tokens(batch: MicroBatch) -> list[tuple[torch.Tensor, int]]:
    """(tokens, number of response tokens) of each sample of a batch that does not share prompts."""
    trees = batch.tokens.split(batch.tree_cu_seqlens.diff().tolist())
    return list(zip(trees, batch.loss_cu_seqlens.diff().tolist(), strict=True))


def reference_log_probs(model: PreTrainedModel, batch: MicroBatch, temperature: float):
    """(logp [R], entropy [R]) by transformers, one sample at a time."""
    logp, entropy = [], []
    for tokens, count in sample_tokens(batch):
        logits = model(tokens[None]).logits[0].float() / temperature
        rows = logits.log_softmax(-1)[-count - 1 : -1]
        logp.append(rows.gather(1, tokens[-count:, None])[:, 0])
        entropy.append(-(rows.exp() * rows).sum(-1))
    return torch.cat(logp), torch.cat(entropy)


def weighted_loss(batch: MicroBatch, logp: torch.Tensor, entropy: torch.Tensor):
    """A loss with another weight for every token, and an entropy term, that adds up over micro-batches."""
    weights = torch.sin(batch.targets.float() + batch.advantages)
    return -(weights * logp).sum() / 50 - 0.01 * entropy.sum() / 50, {"tokens": logp.numel()}


def gradients_of(actor: MegatronActor, batches: list[MicroBatch], loss_fn=weighted_loss) -> dict[str, torch.Tensor]:
    actor.forward_backward(batches, loss_fn)
    return dict(actor.gradients())


def assert_gradients_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5):
    """Every entry within `tolerance` of the largest entry of the same weight's gradient."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert difference <= tolerance, f"{name}: {difference:.2e}"


@pytest.fixture(scope="session")
def ran_layouts(tmp_path_factory):
    """(folders by family, where folders were exported to, by rank what `layouts.on_every_rank` returned)"""
    from tests.train.megatron import layouts

    root = tmp_path_factory.mktemp("layouts")
    folders = {family: root / family for family, _ in layouts.CASES.values()}
    for family, folder in folders.items():
        make_reference(family).save_pretrained(folder)
    ranks = run_ranks(layouts.on_every_rank, layouts.RANKS, folders, root / "out", timeout_s=300)
    return folders, root / "out", ranks


@pytest.fixture
def make_folder(tmp_path):
    def make(name: str = "qwen3-tied", seed: int = 0) -> tuple[Path, PreTrainedModel]:
        folder = tmp_path / f"{name}-{seed}"
        model = make_reference(name, seed)
        model.save_pretrained(folder)
        return folder, model

    return make


@pytest.fixture
def make_actor():
    actors = []

    def make(
        folder: Path,
        *,
        dtype="float32",
        temperature=1.0,
        total_steps=10,
        recompute="none",
        max_grad_norm=1.0,
        loss_kernel="auto",
        logits_chunk_tokens=None,
        **optimizer,
    ):
        actor = MegatronActor(
            ModelConfig(path=str(folder), dtype=dtype),
            parallel=ParallelConfig(),
            optimizer=OptimizerConfig(**optimizer),
            stack=StackConfig(
                max_grad_norm=max_grad_norm,
                recompute=recompute,
                loss_kernel=loss_kernel,
                logits_chunk_tokens=logits_chunk_tokens,
            ),
            temperature=temperature,
            total_steps=total_steps,
            seed=0,
        )
        actors.append(actor)
        return actor

    yield make
    for actor in actors:
        actor.close()
