"""How the weights of the Hugging Face families lie in Megatron-Core: names as data, and the few changes of layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unirl.train.megatron.architecture import Architecture


class Layout(Protocol):
    """How one Megatron weight is made of Hugging Face tensors, and taken apart again."""

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor: ...

    def split(self, weight: torch.Tensor) -> list[torch.Tensor]: ...


class Copy:
    """One tensor, the same in both."""

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return tensors[0]

    def split(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [weight]


class GateUp:
    """fc1 = [gate; up]."""

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(tensors))

    def split(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return list(weight.chunk(2))


@dataclass(frozen=True)
class Qkv:
    """For each KV group in turn: the rows of its query heads, of its key head, of its value head."""

    num_heads: int
    num_groups: int
    head_dim: int

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        by_group = [tensor.unflatten(0, (self.num_groups, -1)) for tensor in tensors]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, weight: torch.Tensor) -> list[torch.Tensor]:
        rows = [self.num_heads // self.num_groups * self.head_dim, self.head_dim, self.head_dim]
        return [part.flatten(0, 1) for part in weight.unflatten(0, (self.num_groups, -1)).split(rows, dim=1)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the vocabulary, padded with zeros in Megatron."""

    size: int
    padded_size: int

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        (weight,) = tensors
        return torch.cat([weight, weight.new_zeros(self.padded_size - self.size, weight.shape[1])])

    def split(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [weight[: self.size]]


@dataclass(frozen=True)
class WeightMap:
    """One Megatron parameter and the Hugging Face tensors it is made of."""

    name: str
    hf_names: tuple[str, ...]
    layout: Layout


_LAYER = (
    ("input_layernorm.weight", ("input_layernorm.weight",), "copy"),
    ("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv"),
    ("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv"),
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "copy"),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "copy"),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "copy"),
    ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "copy"),
    ("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "copy"),
)
"""Of one layer: Megatron name, Hugging Face names, layout. Qwen3, Qwen2 and Llama differ by what they leave out."""


def weight_maps(architecture: Architecture, padded_vocab_size: int) -> list[WeightMap]:
    """Every weight of the model, in the order in which weights are exported."""
    left_out = set()
    if not architecture.qkv_bias:
        left_out.add("self_attention.linear_qkv.bias")
    if not architecture.qk_norm:
        left_out |= {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    vocabulary = Vocabulary(architecture.vocab_size, padded_vocab_size)
    layouts = {
        "copy": Copy(),
        "gate_up": GateUp(),
        "qkv": Qkv(architecture.num_heads, architecture.num_kv_heads, architecture.head_dim),
    }
    maps = [WeightMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)]
    for layer in range(architecture.num_layers):
        maps += [
            WeightMap(
                f"decoder.layers.{layer}.{name}",
                tuple(f"model.layers.{layer}.{hf_name}" for hf_name in hf_names),
                layouts[layout],
            )
            for name, hf_names, layout in _LAYER
            if name not in left_out
        ]
    maps.append(WeightMap("decoder.final_layernorm.weight", ("model.norm.weight",), Copy()))
    if not architecture.tied:
        maps.append(WeightMap("output_layer.weight", ("lm_head.weight",), vocabulary))
    return maps
