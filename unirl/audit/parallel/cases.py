"""What an audit trains: the small models and the losses of the default one, or those of a recipe."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from unirl.algorithms import PolicyLossConfig
from unirl.algorithms.config import RejectionConfig
from unirl.audit.parallel.batches import LONGEST, ON_POLICY, Noise, make_parts
from unirl.audit.parallel.train import ParallelCase, audit_optimizer
from unirl.config.schema import CriticConfig, ModelConfig, StackConfig, TrainConfig
from unirl.demo.folder import quiet_progress
from unirl.train.megatron.architecture import read_architecture

VOCAB = 131
"""Token ids of the small models; tp=4 pads them to 512, so that two of its shards are padding alone."""
ALL, SOME, ONE = 4096, 80, LONGEST
"""Tokens of a micro-batch: every sample in one, a few, hardly more than a single one."""

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "tied": lambda: Qwen3Config(**_SIZES, tie_word_embeddings=True),
    "biased": lambda: Qwen2Config(**_SIZES | {"hidden_size": 64}, tie_word_embeddings=False),
    "experts": lambda: Qwen3MoeConfig(**_SIZES, **_EXPERTS, tie_word_embeddings=False),
}
"""Norms of queries and keys and a tied head; biases and a head of its own; experts. All have grouped queries."""


@dataclass(frozen=True)
class _Plan:
    """A case of the default audit. keys: of the loss. tokens: of a micro-batch, other: in the pass before. top_k: most
    tokens that a token was drawn from; None: from the whole vocabulary.
    """

    name: str
    keys: dict
    model: str = "tied"
    tokens: int = SOME
    other: int = ONE
    stack: dict | None = None
    noise: Noise | None = None
    critic: bool = False
    top_k: int | None = None


_BY_TOKEN = {"level": "token", "metric": "ratio", "lower": 0.8, "upper": 1.25}
_BY_SEQUENCE = {"level": "sequence", "metric": "kl_k3", "agg": "mean", "upper": 0.05}
_PPO = {"loss": "ppo", "eps_clip": 0.2, "eps_clip_higher": 0.28}
_NORM = {"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 16}
DENSE = (
    _Plan("drpo", {"loss": "drpo", "drpo_epsilon": 0.01, **_NORM}, tokens=ALL, stack={"loss_kernel": "fused"}),
    _Plan("ppo with KL", {**_PPO, "c_clip": 1.5, "kl_coef": 0.1}, "biased", tokens=ONE, other=ALL),
    _Plan(
        "gspo",
        {
            "loss": "ppo",
            "eps_clip": 0.03,
            "importance_sampling_level": "sequence",
            "loss_agg_mode": "seq-mean-token-mean",
        },
        stack={"recompute": "full"},
    ),
    _Plan(
        "spo with KL, shared prompts",
        {"loss": "spo", "kl_coef": 0.1, "kl_estimator": "k2", "loss_agg_mode": "seq-mean-token-sum"},
        "biased",
        stack={"share_prompts": True},
    ),
    _Plan(
        "dppo with entropy, chunked logits",
        {"loss": "dppo", "dppo_delta": 0.002, "entropy_coef": 0.01},
        stack={"logits_chunk_tokens": 5, "recompute": "selective"},
        other=ALL,
    ),
    _Plan(
        "sapo with entropy, sampled support, shared prompts",
        {"loss": "sapo", "entropy_coef": 0.01},
        "biased",
        stack={"share_prompts": True},
        top_k=7,
    ),
    _Plan("cispo", {"loss": "cispo", "eps_clip": 0.5, "eps_clip_higher": 0.3, "loss_agg_mode": "seq-mean-token-sum"}),
    _Plan(
        "tokens rejected",
        {**_PPO, "use_decoupled_loss": True, "rejection_sampling": RejectionConfig(**_BY_TOKEN), **_NORM},
    ),
    _Plan(
        "sequences rejected, two updates",
        {**_PPO, "use_decoupled_loss": True, "rejection_sampling": RejectionConfig(**_BY_SEQUENCE)},
        "biased",
        stack={"num_updates_per_batch": 2},
    ),
    _Plan("on-policy drpo of sequences", {"loss": "drpo", "importance_sampling_level": "sequence"}, noise=ON_POLICY),
    _Plan("ppo with a critic", {**_PPO, "old_logp_source": "recompute"}, critic=True, stack={"share_prompts": True}),
)
"""Every loss and aggregation mode, ratios of tokens and of sequences, KL, entropy, both levels of rejection, replay of
the sampled support.
"""
EXPERTS = (
    _Plan("experts, drpo with entropy", {"loss": "drpo", "entropy_coef": 0.01, **_NORM}, "experts"),
    _Plan("experts, ppo with KL", {**_PPO, "kl_coef": 0.1}, "experts", tokens=ONE, other=ALL),
)


def write_model(config: PretrainedConfig, folder: Path) -> str:
    """Write a random model, norms and biases random as well, into the new `folder`; its path."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.1)
    with quiet_progress():
        model.save_pretrained(folder)
    return str(folder)


def default_cases(root: Path, *, experts: bool = False) -> list[ParallelCase]:
    """The cases of the audit without a recipe, of dense models or of one with experts, written below `root`."""

    @cache
    def folder_of(kind: str) -> str:
        folder = root / kind
        return str(folder) if folder.exists() else write_model(MODELS[kind](), folder)

    return [_default_case(plan, folder_of(plan.model)) for plan in (EXPERTS if experts else DENSE)]


def _default_case(plan: _Plan, folder: str) -> ParallelCase:
    return ParallelCase(
        plan.name,
        ModelConfig(path=folder),
        PolicyLossConfig(**plan.keys),
        make_parts(VOCAB, plan.noise, plan.top_k),
        plan.other,
        # A low ceiling, so that the gradients are clipped: their norm then matters.
        StackConfig(micro_batch_tokens=plan.tokens, max_grad_norm=0.05, **(plan.stack or {})),
        critic=CriticConfig() if plan.critic else None,
        temperature=0.8,
    )


def recipe_cases(config: TrainConfig, root: Path) -> list[ParallelCase]:
    """Those of a recipe: its model (one of `MODELS` where `model.path` is no folder here), algorithm, stack and critic,
    with micro-batches of its own token budget, of a few samples, and of hardly more than one.
    """
    is_here = has_model(config.model.path)
    path = config.model.path if is_here else write_model(MODELS["tied"](), root / "tied")
    critic = config.algorithm.critic
    if critic is not None and not (is_here and critic.path and has_model(critic.path)):
        critic = replace(critic, path=None)
    vocab = read_architecture(Path(path), trust_remote_code=config.model.trust_remote_code).vocab_size
    keys = {"betas": config.optimizer.betas, "weight_decay": config.optimizer.weight_decay}
    cases = []
    for name, tokens, other in (("as configured", max(config.stack.micro_batch_tokens, LONGEST), ONE), *_BUDGETS):
        stack = replace(config.stack, micro_batch_tokens=tokens)
        cases.append(
            ParallelCase(
                f"{config.algorithm.loss}, {name}",
                replace(config.model, path=path),
                config.algorithm,
                make_parts(vocab),
                other,
                stack,
                critic=critic,
                temperature=config.algorithm.temperature,
                optimizer=audit_optimizer(stack, **keys),
            )
        )
    return cases


_BUDGETS = ((f"{SOME} tokens", SOME, ALL), (f"{ONE} tokens", ONE, SOME))


def has_model(path: str) -> bool:
    """Whether a path is a Hugging Face folder on this machine."""
    return (Path(path) / "config.json").is_file()
