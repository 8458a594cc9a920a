"""What a Hugging Face config says of a policy, checked: anything that training would not reproduce is refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.rope import Llama3Scaling, RopeConfig


@dataclass(frozen=True)
class MixtureOfExperts:
    """Every layer's MLP is `num_experts` small ones of which a router picks `experts_per_token` for each token.

    normalized: the weights of the picked experts sum to 1 (config.json: norm_topk_prob).
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalized: bool


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama family: pre-norm RMSNorm, grouped-query attention with RoPE, SwiGLU, no dropout."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    qk_norm: bool
    qkv_bias: bool
    tied: bool
    moe: MixtureOfExperts | None = None

    @property
    def active_ffn_size(self) -> int:
        """Columns of the MLP that a token goes through: with experts, those of all that are picked for it."""
        return self.ffn_hidden_size if self.moe is None else self.moe.experts_per_token * self.moe.ffn_hidden_size


@dataclass(frozen=True)
class _Family:
    """What the model type implies, and the values other config fields must have."""

    qk_norm: bool
    qkv_bias: bool
    required: dict[str, Any]
    experts: bool = False


_REQUIRED: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "quantization_config": None}
_FAMILIES = {
    "llama": _Family(qk_norm=False, qkv_bias=False, required={"attention_bias": False, "mlp_bias": False}),
    "qwen2": _Family(qk_norm=False, qkv_bias=True, required={"use_sliding_window": False}),
    "qwen3": _Family(qk_norm=True, qkv_bias=False, required={"attention_bias": False, "use_sliding_window": False}),
    "qwen3_moe": _Family(
        qk_norm=True,
        qkv_bias=False,
        required={
            "attention_bias": False,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        experts=True,
    ),
}
MODEL_TYPES = tuple(_FAMILIES)


def read_architecture(folder: Path, *, trust_remote_code: bool = False) -> Architecture:
    """The architecture of the Hugging Face folder.

    Raises UserError that names the file, the field, the value found and what is supported.
    """
    where = folder / "config.json"
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"{where} cannot be read as the config of a model: {error}") from error
    if config.model_type not in _FAMILIES:
        raise UserError(f"{where}: model_type {config.model_type!r} is not supported, only {', '.join(_FAMILIES)}")
    family = _FAMILIES[config.model_type]
    for field, required in (_REQUIRED | family.required).items():
        _require(where, field, getattr(config, field, required), required, lambda found, wanted: found == wanted)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    _require(where, "layer_types", sorted(layer_types), ["full_attention"], lambda found, wanted: found == wanted)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope=_read_rope(where, config, head_dim),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tied=bool(config.tie_word_embeddings),
        moe=_read_experts(config) if family.experts else None,
    )


def check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Raises UserError, with the sizes that fit, where the model cannot be split by `parallel`."""
    split_by_tp = {"attention heads": architecture.num_heads, "key-value heads": architecture.num_kv_heads}
    if architecture.moe is None:
        split_by_tp["columns of the MLP"] = architecture.ffn_hidden_size
    elif parallel.ep == 1:
        split_by_tp["columns of an expert"] = architecture.moe.ffn_hidden_size
    _check_divides("tp", parallel.tp, split_by_tp)
    _check_divides("pp", parallel.pp, {"layers": architecture.num_layers})
    if parallel.vpp is not None:
        if parallel.pp == 1:
            raise UserError(f"parallel.vpp={parallel.vpp}: a pipeline of one stage has no chunks, set it to null")
        _check_divides("vpp", parallel.vpp, {"layers of a stage": architecture.num_layers // parallel.pp})
    if parallel.sequence_parallel and parallel.tp == 1:
        raise UserError("parallel.sequence_parallel=true needs parallel.tp > 1")
    if architecture.moe is not None:
        _check_divides("ep", parallel.ep, {"experts": architecture.moe.num_experts})
        if parallel.tp > 1 and not parallel.sequence_parallel:
            raise UserError("a model with experts needs parallel.sequence_parallel=true where parallel.tp > 1")
    elif parallel.ep > 1:
        raise UserError(f"parallel.ep={parallel.ep}: the model has no experts, set parallel.ep=1")


def _check_divides(key: str, size: int, parts: dict[str, int]) -> None:
    largest = math.gcd(*parts.values())
    if largest % size:
        found = ", ".join(f"{number} {what}" for what, number in parts.items())
        fit = ", ".join(str(divisor) for divisor in range(1, largest + 1) if largest % divisor == 0)
        raise UserError(f"parallel.{key}={size} does not divide what the model has: {found}; sizes that fit: {fit}")


def _read_experts(config: PretrainedConfig) -> MixtureOfExperts:
    return MixtureOfExperts(
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        ffn_hidden_size=config.moe_intermediate_size,
        normalized=bool(config.norm_topk_prob),
    )


def _read_rope(where: Path, config: PretrainedConfig, head_dim: int) -> RopeConfig:
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    _require(where, "rope_parameters.rope_type", kind, ["default", "llama3"], lambda found, wanted: found in wanted)
    partial = rope.get("partial_rotary_factor", 1.0)
    _require(where, "rope_parameters.partial_rotary_factor", partial, 1.0, lambda found, wanted: found == wanted)
    if kind == "default":
        return RopeConfig(head_dim, float(rope["rope_theta"]))
    scaling = Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )
    return RopeConfig(head_dim, float(rope["rope_theta"]), scaling)


def _require(where: Path, field: str, found: Any, wanted: Any, accepts: Callable[[Any, Any], bool]) -> None:
    if not accepts(found, wanted):
        raise UserError(f"{where}: {field} is {found!r}, but training supports {wanted!r} only")
