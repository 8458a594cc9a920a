"""What the ranks hold of a model, put together and compared where several hold the same."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.names import weight_maps
from unirl.train.megatron.weights import global_name


def _name(chunk: PackedModel, name: str) -> str:
    """A tied head on a stage of its own is a copy of the embedding."""
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    return global_name(chunk, name)


def unshard(parts: list[torch.Tensor], name: str, dim: int) -> torch.Tensor:
    if "linear_fc1" in name:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([torch.cat(half) for half in halves])
    return torch.cat(parts, dim)


@dataclass(frozen=True)
class RankWeights:
    """Of one rank: (name in the whole model, index and dimension of the shard, tensor); dimension None: not sharded."""

    tp_rank: int
    maps: list
    entries: list[tuple[str, int | None, torch.Tensor]]


def rank_weights(chunks: Sequence[PackedModel], tensor_of) -> RankWeights:
    entries = []
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
            entries.append((_name(chunk, name), dim, tensor_of(parameter).detach().float().clone()))
    return RankWeights(
        parallel_state.get_tensor_model_parallel_rank(),
        weight_maps(chunks[0].architecture, chunks[0].vocab_size),
        entries,
    )


def full_weights(ranks: Sequence[RankWeights]):
    """(Hugging Face name, whole tensor); copies on several ranks must be equal."""
    found: dict[str, dict[int, torch.Tensor]] = {}
    dims = {}
    for rank in ranks:
        for name, dim, tensor in rank.entries:
            index = 0 if dim is None else rank.tp_rank
            dims[name] = dim
            copy = found.setdefault(name, {}).setdefault(index, tensor)
            if not torch.equal(copy, tensor):
                raise RuntimeError(f"{name}: ranks differ by {(copy - tensor).abs().max():.2e}")
    maps = {weight.name: weight for weight in ranks[0].maps}
    for name, shards in found.items():
        parts = [shards[index] for index in sorted(shards)]
        whole = parts[0] if len(parts) == 1 else unshard(parts, name, dims[name])
        if name not in maps:
            yield name, whole
            continue
        yield from maps[name].merge([whole])
