"""How the weights of the Hugging Face families lie in Megatron-Core: names, changes of layout and shards, as data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from unirl.train.megatron.architecture import Architecture


class Source(Protocol):
    """A Hugging Face tensor that may still lie on disk: only what is indexed is read. A torch.Tensor is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index) -> torch.Tensor: ...


class Layout(Protocol):
    """How a Megatron weight, or one rank's shard of it, is made of Hugging Face tensors and taken apart again."""

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

    heads_per_group: int
    head_dim: int

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        by_group = [tensor.unflatten(0, (-1, rows)) for tensor, rows in zip(tensors, self._rows, strict=True)]
        return torch.cat(by_group, dim=1).flatten(0, 1)

    def split(self, weight: torch.Tensor) -> list[torch.Tensor]:
        by_group = weight.unflatten(0, (-1, sum(self._rows))).split(self._rows, dim=1)
        return [part.flatten(0, 1) for part in by_group]

    @property
    def _rows(self) -> list[int]:
        return [self.heads_per_group * self.head_dim, self.head_dim, self.head_dim]


@dataclass(frozen=True)
class Padding:
    """Rows of the vocabulary: `size` in the Hugging Face tensor, zeros behind them up to `padded_size`."""

    size: int
    padded_size: int


@dataclass(frozen=True)
class WeightMap:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    name: that of the whole model: its layer and its expert are counted over all ranks.
    tp_dim: the dimension in which every one of the Hugging Face tensors is cut into equal pieces, one for each
        tensor-parallel rank, whose shard is made of its pieces alone. None: each rank has all of it.
    expert: number of the expert, of which only one expert-parallel rank has the weight.
    exported: False for a parameter that repeats another one: a tied head that lies on a pipeline stage of its own.
    """

    name: str
    hf_names: tuple[str, ...]
    layout: Layout
    tp_dim: int | None = None
    padding: Padding | None = None
    expert: int | None = None
    exported: bool = True

    def read(self, sources: Sequence[Source], rank: int, size: int) -> torch.Tensor:
        """The shard of tensor-parallel rank `rank` of `size`; of each source no more is read than that takes.

        Raises ValueError where a source cannot be cut into equal pieces.
        """
        return self.layout.join([self._piece(source, rank, size) for source in sources])

    def merge(self, shards: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """(Hugging Face name, copy of the full tensor) from the shards of all tensor-parallel ranks, in their order."""
        if self.tp_dim is None:
            shards = shards[:1]
        pieces = zip(*(self.layout.split(shard) for shard in shards), strict=True)
        full = [torch.cat(piece, dim=self.tp_dim or 0) for piece in pieces]
        if self.padding is not None:
            full = [tensor[: self.padding.size] for tensor in full]
        return list(zip(self.hf_names, full, strict=True))

    def _piece(self, source: Source, rank: int, size: int) -> torch.Tensor:
        if self.tp_dim is None:
            return source[:]
        shape = tuple(source.shape)
        length = shape[self.tp_dim]
        if self.padding is not None:
            if length != self.padding.size:
                raise ValueError(
                    f"{self.hf_names[0]} has {length} rows, the vocabulary of config.json has {self.padding.size}"
                )
            length = self.padding.padded_size
        if length % size:
            raise ValueError(f"{self.name} cannot be cut into {size} pieces: shape {shape}, dimension {self.tp_dim}")
        start, end = rank * length // size, (rank + 1) * length // size
        if self.tp_dim == 1:
            return source[:, start:end]
        stored = source[min(start, shape[0]) : min(end, shape[0])]
        missing = end - start - stored.shape[0]
        return torch.cat([stored, stored.new_zeros(missing, *shape[1:])]) if missing else stored


_ATTENTION = (
    ("input_layernorm.weight", ("input_layernorm.weight",), "copy", None),
    ("self_attention.linear_qkv.weight", tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), "qkv", 0),
    ("self_attention.linear_qkv.bias", tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), "qkv", 0),
    ("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), "copy", None),
    ("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), "copy", None),
    ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "copy", 1),
    ("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "copy", None),
)
"""Of one layer: Megatron name, Hugging Face names, layout, tensor-parallel dimension. Qwen3, Qwen2 and Llama differ by
what they leave out."""

_MLP = (
    ("linear_fc1.weight", ("gate_proj.weight", "up_proj.weight"), "gate_up", 0),
    ("linear_fc2.weight", ("down_proj.weight",), "copy", 1),
)
"""Of the MLP of a layer, or of one of its experts."""

_ROUTER = ("mlp.router.weight", ("mlp.gate.weight",), "copy", None)


def weight_maps(architecture: Architecture, padded_vocab_size: int) -> list[WeightMap]:
    """Every weight of the model, in the order in which weights are exported."""
    vocabulary = {"layout": Copy(), "tp_dim": 0, "padding": Padding(architecture.vocab_size, padded_vocab_size)}
    maps = [WeightMap("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), **vocabulary)]
    for layer in range(architecture.num_layers):
        maps += _layer_maps(architecture, layer)
    maps.append(WeightMap("decoder.final_layernorm.weight", ("model.norm.weight",), Copy()))
    head = "model.embed_tokens.weight" if architecture.tied else "lm_head.weight"
    maps.append(WeightMap("output_layer.weight", (head,), **vocabulary, exported=not architecture.tied))
    return maps


def hf_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every Hugging Face tensor of the model, by name."""
    hidden, moe = architecture.hidden_size, architecture.moe
    queries, keys = (heads * architecture.head_dim for heads in (architecture.num_heads, architecture.num_kv_heads))
    width = architecture.ffn_hidden_size if moe is None else moe.ffn_hidden_size
    by_ending = {
        "embed_tokens.weight": (architecture.vocab_size, hidden),
        "lm_head.weight": (architecture.vocab_size, hidden),
        "norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "q_norm.weight": (architecture.head_dim,),
        "k_norm.weight": (architecture.head_dim,),
        "o_proj.weight": (hidden, queries),
        "gate.weight": (moe and moe.num_experts, hidden),
        "gate_proj.weight": (width, hidden),
        "up_proj.weight": (width, hidden),
        "down_proj.weight": (hidden, width),
    }
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        by_ending |= {f"{name}.weight": (rows, hidden), f"{name}.bias": (rows,)}
    names = (name for weight in weight_maps(architecture, architecture.vocab_size) for name in weight.hf_names)
    return {name: by_ending[".".join(name.split(".")[-2:])] for name in names}


def _layer_maps(architecture: Architecture, layer: int) -> Iterable[WeightMap]:
    left_out = set()
    if not architecture.qkv_bias:
        left_out.add("self_attention.linear_qkv.bias")
    if not architecture.qk_norm:
        left_out |= {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    layouts = {
        "copy": Copy(),
        "gate_up": GateUp(),
        "qkv": Qkv(architecture.num_heads // architecture.num_kv_heads, architecture.head_dim),
    }

    def weight_map(row: tuple, part: str = "", hf_part: str = "", expert: int | None = None) -> WeightMap:
        name, hf_names, layout, tp_dim = row
        return WeightMap(
            f"decoder.layers.{layer}.{part}{name}",
            tuple(f"model.layers.{layer}.{hf_part}{hf_name}" for hf_name in hf_names),
            layouts[layout],
            tp_dim,
            expert=expert,
        )

    yield from (weight_map(row) for row in _ATTENTION if row[0] not in left_out)
    if architecture.moe is None:
        yield from (weight_map(row, "mlp.", "mlp.") for row in _MLP)
        return
    yield weight_map(_ROUTER)
    for expert in range(architecture.moe.num_experts):
        for row in _MLP:
            yield weight_map(row, f"mlp.experts.local_experts.{expert}.", f"mlp.experts.{expert}.", expert)
