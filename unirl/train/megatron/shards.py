"""The part of a Hugging Face folder that one rank holds."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from safetensors import safe_open

from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.names import weight_maps
from unirl.train.megatron.weights import _tensor_files, load_weights


def load_shards(chunks: Sequence[PackedModel], folder: Path) -> None:
    config = chunks[0].config
    if config.tensor_model_parallel_size == config.pipeline_model_parallel_size == 1:
        load_weights(chunks[0], folder)
        return
    files = _tensor_files(folder)
    maps = {weight.name: weight for weight in weight_maps(chunks[0].architecture, chunks[0].vocab_size)}
    with ExitStack() as stack, torch.no_grad():
        opened = {file: stack.enter_context(safe_open(folder / file, "pt")) for file in set(files.values())}
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.startswith("value_head"):
                    continue
                weight = maps[global_name(chunk, name)]
                full = weight.layout.join([opened[files[hf]].get_tensor(hf) for hf in weight.hf_names])
                parameter.copy_(shard(full, name, parameter))


def global_name(chunk: PackedModel, name: str) -> str:
    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if parts[0] == "decoder" and parts[1] == "layers":
        parts[2] = str(int(parts[2]) + get_transformer_layer_offset(chunk.config, chunk.vp_stage))
    return ".".join(parts)


def shard(full: torch.Tensor, name: str, parameter: torch.Tensor) -> torch.Tensor:
    size, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    if not getattr(parameter, "tensor_model_parallel", False):
        return full
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, parameter.partition_dim)[rank]


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
            entries.append((global_name(chunk, name), dim, tensor_of(parameter).detach().float().clone()))
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
        weight = maps[name]
        yield from zip(weight.hf_names, weight.layout.split(whole), strict=True)
