"""Hugging Face weights into and out of the shards of a model, whatever its parallel sizes, one tensor at a time."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from unirl.errors import UserError
from unirl.train.megatron.hf_folder import MAX_SHARD_BYTES, HfTensors, write_hf_folder
from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.names import WeightMap, weight_maps

Receivers = Literal["all", "first", "stages"]
"""Which ranks are given the full tensors: every rank; rank 0 alone; or, of each pipeline stage, its first rank, which
is given the tensors of its own stage."""

VALUE_HEAD = "value_head."
"""What begins the names that Hugging Face does not know."""
_LAYER = re.compile(r"(?<=decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+")
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
"""Of experts in one grouped matrix product: the weight of expert 3 is called weight3."""


def load_weights(chunks: Sequence[PackedModel], folder: Path) -> None:
    """Fill every weight of this rank's `chunks` (one for each virtual pipeline stage) from the safetensors of `folder`.

    Each rank reads the slices it owns and nothing else; no rank waits for another. Raises UserError where there are no
    safetensors, a file cannot be read, a name is missing, a name has no place in the model, or a shape is another one.
    """
    maps = {weight.name: weight for weight in weight_maps(chunks[0].architecture, chunks[0].vocab_size)}
    with HfTensors(folder) as tensors, torch.no_grad():
        tensors.check_names(maps.values())
        for name, parameter in global_parameters(chunks).items():
            if name not in maps:
                raise RuntimeError(f"names.py has no weight {name}: a family that is not mapped whole")
            weight = maps[name]
            group = tensor_group(weight)
            shard = weight.read([tensors[name] for name in weight.hf_names], group.rank(), group.size())
            if shard.shape != parameter.shape:
                raise UserError(
                    f"{folder}: {' + '.join(weight.hf_names)} give a weight of shape {tuple(shard.shape)}, "
                    f"config.json implies {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)


def iterate_weights(
    chunks: Sequence[PackedModel], *, receivers: Receivers = "all"
) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, copy of the full tensor) of every weight, in the order of `weight_maps`; the vocabulary
    without padding and a tied head not repeated.

    Collective: every rank runs the iterator to its end. Ranks that are not among the receivers are given nothing. A
    rank holds one weight at a time. With an optimizer that gathers parameters late
    (overlap_param_gather), force that first.
    """
    tensors = {name: parameter.detach() for name, parameter in global_parameters(chunks).items()}
    return iter(_FullTensors(chunks[0], tensors, receivers))


def iterate_gradients(
    modules: Sequence[DistributedDataParallel], *, receivers: Receivers = "all"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same for the gradients, float32, of the chunks that Megatron's DistributedDataParallel wraps.

    The distributed optimizer leaves each rank with the sum over its own part of the gradients; the parts are gathered
    in place.
    """
    for module in modules:
        _gather_gradients(module)
    chunks = [module.module for module in modules]
    tensors = {name: parameter.main_grad for name, parameter in global_parameters(chunks).items()}
    return iter(_FullTensors(chunks[0], tensors, receivers))


def export_hf(
    chunks: Sequence[PackedModel], source: Path, folder: Path, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a new Hugging Face folder from any layout, see `write_hf_folder`: collective, rank 0 writes.

    Raises FileExistsError on every rank where `folder` exists.
    """
    exists = [folder.exists()]
    dist.broadcast_object_list(exists, src=0)
    if exists[0]:
        raise FileExistsError(f"{folder} exists: give a new folder, or remove it")
    weights = iterate_weights(chunks, receivers="first")
    try:
        if dist.get_rank() == 0:
            write_hf_folder(weights, source, folder, max_shard_bytes=max_shard_bytes)
    finally:
        for _ in weights:  # the other ranks wait for this one, also where it could not write
            pass


def feed_stage(chunks: Sequence[PackedModel], consume: Callable[[Iterator], Any], stage: int) -> Any:
    """What `consume` makes of the weights of a pipeline stage, on the stage's first rank; None on the others.

    Collective; the weights come as `iterate_weights` gives them, gathered over the stage's ranks as they are consumed.
    """
    weights = iterate_weights(chunks, receivers="stages")
    if parallel_state.get_pipeline_model_parallel_rank() != stage:
        return None
    try:
        return consume(weights) if _is_first_of_stage() else None
    finally:
        for _ in weights:  # the other ranks wait for this one, also where it gave up
            pass


def stage_shapes(chunks: Sequence[PackedModel]) -> list[tuple[str, tuple[int, ...]]]:
    """Hugging Face name and full shape of what `feed_stage` gives this rank, [] where it gives nothing.

    From this rank's own shards, which those of other ranks are like: nothing is gathered.
    """
    if not _is_first_of_stage():
        return []
    model, own = chunks[0], global_parameters(chunks)
    shapes = []
    for weight in weight_maps(model.architecture, model.vocab_size):
        shard = own.get(weight.name if weight.expert is None else _own_expert(model, weight))
        if shard is None or not weight.exported:
            continue
        shards = [torch.empty_like(shard, device="meta")] * tensor_group(weight).size()
        shapes += [(name, tuple(tensor.shape)) for name, tensor in weight.merge(shards)]
    return shapes


def global_parameters(chunks: Sequence[PackedModel]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters that Hugging Face knows, under the names they have in a model of one rank."""
    return {
        global_name(chunk, name): parameter
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
        if not name.startswith(VALUE_HEAD)
    }


def global_name(chunk: PackedModel, name: str) -> str:
    """The name in a model of one rank, without Transformer Engine: layers and experts counted over all ranks."""
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)

    def layer(found: re.Match) -> str:
        return str(chunk.decoder.layers[int(found[0])].layer_number - 1)

    def expert(found: re.Match) -> str:
        return str(parallel_state.get_expert_model_parallel_rank() * _local_experts(chunk) + int(found[0]))

    return _EXPERT.sub(expert, _LAYER.sub(layer, name))


class _FullTensors:
    """The full tensors, under Hugging Face names, of which `tensors` are this rank's shards under global names."""

    def __init__(self, model: PackedModel, tensors: dict[str, torch.Tensor], receivers: Receivers):
        self._tensors = tensors
        self._maps = [weight for weight in weight_maps(model.architecture, model.vocab_size) if weight.exported]
        self._model = model
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._across_stages = receivers != "stages"
        self._owners = self._find_owners()
        first_of_stage = _is_first_of_stage()
        self._sends = _is_first_replica() or receivers == "all"
        self._receives = {
            "all": True,
            "first": first_of_stage and self._stage == 0,
            "stages": first_of_stage,
        }[receivers]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weight in self._maps:
            owned = self._owners[weight.name].stage == self._stage
            if not (owned or self._across_stages):
                continue
            shard = self._tensors.get(weight.name)
            if owned and weight.expert is not None:
                shard = self._from_expert_rank(weight, shard)  # of all replicas, experts are spread over them
            if not self._sends:
                continue
            if self._across_stages:
                shard = self._from_stage(weight, shard)
            shards = _all_shards(weight, shard)
            if self._receives:
                yield from weight.merge(shards)

    def _find_owners(self) -> dict[str, "_Owner"]:
        own = {name: _Owner(self._stage, tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}
        by_stage = [own]
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            by_stage = [None] * group.size()
            dist.all_gather_object(by_stage, own, group=group)
        owners = {name: owner for owned in by_stage for name, owner in owned.items()}
        for weight in self._maps:
            if weight.expert is not None:  # this expert-parallel rank's experts say which stage has the layer
                owners.setdefault(weight.name, owners[_own_expert(self._model, weight)])
        return owners

    def _from_expert_rank(self, weight: WeightMap, shard: torch.Tensor | None) -> torch.Tensor:
        group = parallel_state.get_expert_model_parallel_group()
        if group.size() == 1:
            return shard
        if shard is None:
            shard = self._empty(weight)
        source = dist.get_global_rank(group, weight.expert // _local_experts(self._model))
        dist.broadcast(shard, source, group=group)
        return shard

    def _from_stage(self, weight: WeightMap, shard: torch.Tensor | None) -> torch.Tensor:
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() == 1:
            return shard
        if shard is None:
            shard = self._empty(weight)
        dist.broadcast(shard, dist.get_global_rank(group, self._owners[weight.name].stage), group=group)
        return shard

    def _empty(self, weight: WeightMap) -> torch.Tensor:
        owner = self._owners[weight.name]
        device = next(iter(self._tensors.values())).device
        return torch.empty(owner.shape, dtype=owner.dtype, device=device)


@dataclass(frozen=True)
class _Owner:
    """The pipeline stage that has a weight, and what each shard of it is like."""

    stage: int
    shape: torch.Size
    dtype: torch.dtype


def _all_shards(weight: WeightMap, shard: torch.Tensor) -> list[torch.Tensor]:
    group = tensor_group(weight)
    if weight.tp_dim is None or group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard, group=group)
    return shards


def tensor_group(weight: WeightMap) -> dist.ProcessGroup:
    if weight.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _is_first_replica() -> bool:
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _is_first_of_stage() -> bool:
    return _is_first_replica() and parallel_state.get_tensor_model_parallel_rank() == 0


def _own_expert(model: PackedModel, weight: WeightMap) -> str:
    """The name of the same weight of an expert of this expert-parallel rank."""
    count = _local_experts(model)
    first = parallel_state.get_expert_model_parallel_rank() * count
    return _EXPERT.sub(str(first + weight.expert % count), weight.name)


def _local_experts(model: PackedModel) -> int:
    return (model.config.num_moe_experts or 0) // parallel_state.get_expert_model_parallel_world_size()


def _gather_gradients(module: DistributedDataParallel) -> None:
    if not module.ddp_config.use_distributed_optimizer:
        return
    for bucket_group in module.bucket_groups + module.expert_parallel_bucket_groups:
        group = bucket_group.intra_distributed_optimizer_instance_group
        if group.size() == 1:
            continue
        for bucket in bucket_group.buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, own, group=group)
