"""The architecture of a model, read from the `config.json` of a Hugging Face folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "llama3")
# Fields that change the arithmetic, with the only value that the decoder implements.
_ONLY_VALUES = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


@dataclass(frozen=True)
class ModelConfig:
    """What the native decoder needs to know: a Llama, Qwen2 or Qwen3 (dense) architecture.

    `rope_scaling` holds the parameters of Llama 3's scaling, None for plain RoPE.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    rope_theta: float
    rope_scaling: Mapping[str, float] | None

    @staticmethod
    def from_folder(folder: str | Path) -> "ModelConfig":
        """Read `folder`/config.json. Raises ValueError on an architecture or field that is not supported."""
        path = Path(folder) / "config.json"
        raw = json.loads(path.read_text())
        _refuse_unsupported(raw, path)
        num_heads = _required(raw, "num_attention_heads", path)
        hidden_size = _required(raw, "hidden_size", path)
        rope_theta, rope_scaling = _read_rope(raw, path)
        return ModelConfig(
            vocab_size=_required(raw, "vocab_size", path),
            hidden_size=hidden_size,
            intermediate_size=_required(raw, "intermediate_size", path),
            num_layers=_required(raw, "num_hidden_layers", path),
            num_heads=num_heads,
            num_kv_heads=raw.get("num_key_value_heads") or num_heads,
            head_dim=raw.get("head_dim") or hidden_size // num_heads,
            max_position_embeddings=_required(raw, "max_position_embeddings", path),
            rms_norm_eps=_required(raw, "rms_norm_eps", path),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            qk_norm=raw["model_type"] == "qwen3",
            qkv_bias=raw["model_type"] == "qwen2",
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
        )


def _required(raw: Mapping[str, Any], name: str, path: Path) -> Any:
    if raw.get(name) is None:
        raise ValueError(f"{path}: the field {name!r} is missing")
    return raw[name]


def _refuse_unsupported(raw: Mapping[str, Any], path: Path) -> None:
    model_type = raw.get("model_type")
    if model_type not in _MODEL_TYPES:
        raise ValueError(f"{path}: model_type is {model_type!r}; the native engine runs {', '.join(_MODEL_TYPES)}")
    if model_type == "qwen3":
        _required(raw, "head_dim", path)  # its default is not hidden_size / num_attention_heads
    for name, only in _ONLY_VALUES.items():
        if raw.get(name) not in (None, only):
            raise ValueError(f"{path}: {name} is {raw[name]!r}; the native engine supports only {only!r}")
    other_layers = set(raw.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise ValueError(f"{path}: layer_types has {sorted(other_layers)}; the native engine has only full_attention")


def _read_rope(raw: Mapping[str, Any], path: Path) -> tuple[float, Mapping[str, float] | None]:
    """(theta, scaling parameters or None), from `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ValueError(f"{path}: rope_type is {kind!r}; the native engine supports {', '.join(_ROPE_TYPES)}")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"{path}: partial_rotary_factor is {rope['partial_rotary_factor']!r}, expected 1.0")
    if kind == "default":
        return theta, None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return theta, {name: _required(rope, name, path) for name in names}
