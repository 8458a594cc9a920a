"""A trained model on disk, the same whatever the parallel sizes: fp32 master weights, AdamW's moments, counters, random
state. Weights in less than fp32 are the rounded masters.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.checkpoint import DamagedCheckpointError
from unirl.train.manifest import FileSum
from unirl.train.megatron.dist_checkpoint import ShardedWrite, read_blocks, read_index, read_whole, write_whole
from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.optimizer import OptimizerShard, PolicyOptimizer
from unirl.train.megatron.shards import PlacedWeight, placed_weights, whole_names

WEIGHT = "weight."
COUNTERS = "model.json"
_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainedState:
    """What there is to save of a model under training, and where it is loaded again."""

    chunks: Sequence[PackedModel]
    optimizer: PolicyOptimizer
    parallel: ParallelConfig

    def begin_save(self, folder: Path, *, copy: bool) -> ShardedWrite:
        """Start to write the state into the existing `folder`; every rank writes its share, replicas share theirs.

        copy: whether the state may change before the write is finished.
        """
        state: dict[str, ShardedTensor] = {}
        for weight in placed_weights(self.chunks):
            shard = self.optimizer.shard_of(weight.parameter)
            if shard is None or not weight.is_first:
                continue
            start, stop = _written_range(weight, shard)
            for kind, tensor in self._tensors(shard):
                written = tensor.detach().view(-1)[start - shard.start : stop - shard.start]
                written = written.to("cpu", copy=True) if copy else written
                for block in _blocks(f"{kind}.{weight.name}", weight, written, start):
                    state[str(len(state))] = block
        for name, random in _random_states().items():
            name = f"random.{dist.get_rank()}.{name}"
            state[name] = _whole(name, random)
        return ShardedWrite(state, self._counters(), folder)

    def load(self, folder: Path) -> None:
        """Go on from what any layout has saved.

        Raises on every rank alike: before anything is changed, UserError for a checkpoint of another model and
        DamagedCheckpointError for one that does not say what it holds; OSError where a tensor cannot be read.
        """
        counters = _together(_read_counters, folder)
        _together(self._check_model, folder)
        steps = counters["optimizer_steps"]
        weights = placed_weights(self.chunks)
        with torch.no_grad():
            self._load_weights(weights, folder)
            self.optimizer.start_over(steps)
            if steps:
                self._load_moments(weights, folder, steps)
        if counters["layout"] == self._layout():
            _load_random_states(folder)

    def _tensors(self, shard: OptimizerShard) -> Iterator[tuple[str, torch.Tensor]]:
        yield WEIGHT[:-1], shard.master
        if self.optimizer.steps:
            yield from ((name, shard.moments[name]) for name in _MOMENTS)

    def _load_weights(self, weights: list[PlacedWeight], folder: Path) -> None:
        flat = [_zeros(weight.parameter.numel()) for weight in weights]
        _read(WEIGHT[:-1], weights, flat, [0] * len(flat), folder)
        for weight, values in zip(weights, flat, strict=True):
            weight.parameter.copy_(values.view(weight.parameter.shape))
            shard = self.optimizer.shard_of(weight.parameter)
            if shard is not None and shard.master is not weight.parameter:
                shard.master.copy_(values[shard.start : shard.stop].view(shard.master.shape))

    def _load_moments(self, weights: list[PlacedWeight], folder: Path, steps: int) -> None:
        shards = [(weight, self.optimizer.shard_of(weight.parameter)) for weight in weights]
        owned = [(weight, shard) for weight, shard in shards if shard is not None]
        starts = [shard.start for _, shard in owned]
        found = []
        for moment in _MOMENTS:
            flat = [_zeros(shard.stop - shard.start) for _, shard in owned]
            _read(moment, [weight for weight, _ in owned], flat, starts, folder)
            found.append(flat)
        for (_, shard), *moments in zip(owned, *found, strict=True):
            shard.set_moments(steps, *(moment.to(shard.master.device).view(shard.master.shape) for moment in moments))

    def _check_model(self, folder: Path) -> None:
        tensors = read_index(folder).state_dict_metadata
        found = {name.removeprefix(WEIGHT): tuple(t.size) for name, t in tensors.items() if name.startswith(WEIGHT)}
        here = {weight.name: weight.placement.global_shape for weight in placed_weights(self.chunks)}
        names = {name for name, shape in here.items() if found.get(name) != shape}
        names |= found.keys() - here.keys() - whole_names(self.chunks)
        if names:
            name = min(names)
            raise UserError(
                f"{folder} holds another model than model.path: shape of {name} there {found.get(name, 'missing')}, "
                f"here {here.get(name, 'missing')}; resume with the model of the checkpoint"
            )

    def _counters(self) -> dict[str, Any]:
        return _counters(self.optimizer.steps, self.chunks[0].config.params_dtype, self._layout())

    def _layout(self) -> dict[str, int]:
        sizes = {name: getattr(self.parallel, name) for name in ("tp", "pp", "cp", "ep")}
        return sizes | {"vpp": self.parallel.vpp or 1, "ranks": dist.get_world_size()}


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in a model of one rank, whole weight in the dtype of training) of a saved model, one at a time, in one
    process without a group; the vocabulary without padding.

    Raises OSError, ValueError or KeyError where it cannot be read, UserError for another format.
    """
    dtype = getattr(torch, _read_counters(folder)["dtype"])
    for key, tensor in read_whole(folder, WEIGHT):
        yield key.removeprefix(WEIGHT), tensor.to(dtype)


def write_weights(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    *,
    max_file_bytes: int,
) -> dict[str, FileSum]:
    """Write a model before its first step into the existing `folder`, in one process without a group; its files by
    name. What any layout loads from it are the weights, an optimizer without moments and no random state.

    shapes: of the whole weights, by their names in a model of one rank, the vocabulary without padding.
    read: gives a weight by its name, in any dtype, when its turn has come; those of one file are held.
    dtype: what `read_weights` gives them in.

    Raises CheckpointWriteError, see `write_whole`.
    """
    return write_whole(
        {f"{WEIGHT}{name}": shape for name, shape in shapes.items()},
        lambda key: read(key.removeprefix(WEIGHT)).float(),
        _counters(0, dtype, layout={}),  # of no layout: it has no random states to take up
        folder,
        max_file_bytes=max_file_bytes,
    )


def _counters(steps: int, dtype: torch.dtype, layout: dict[str, int]) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {"format": _FORMAT, "optimizer_steps": steps, "dtype": name, "layout": layout}


def _read_counters(folder: Path) -> dict[str, Any]:
    counters = json.loads((folder / COUNTERS).read_text())
    if counters["format"] != _FORMAT:
        raise UserError(
            f"{folder} has the format {counters['format']}, this version of unirl reads {_FORMAT}: go on with the "
            "version that wrote it"
        )
    return counters


def _written_range(weight: PlacedWeight, shard: OptimizerShard) -> tuple[int, int]:
    """Entries of the flattened weight that this rank writes: of a shard that replicas hold alike, its share of rows."""
    if shard.is_share:
        return shard.start, shard.stop
    rows, length = weight.placement.shape[0], weight.placement.row_length
    rank, size = weight.replicas.rank(), weight.replicas.size()
    return rows * rank // size * length, rows * (rank + 1) // size * length


def _blocks(key: str, weight: PlacedWeight, flat: torch.Tensor, start: int) -> Iterator[ShardedTensor]:
    """Views of `flat`, which holds the entries of the rank's weight from `start` on."""
    for block in weight.placement.blocks(start, start + flat.numel()):
        data = flat[block.start - start : block.stop - start].view(block.shape)
        yield ShardedTensor(
            key, data, data.dtype, block.shape, weight.placement.global_shape, block.offset, axis_fragmentations=None
        )


def _read(kind: str, weights: list[PlacedWeight], flat: list[torch.Tensor], starts: list[int], folder: Path) -> None:
    state: dict[str, ShardedTensor] = {}
    for weight, values, start in zip(weights, flat, starts, strict=True):
        for block in _blocks(f"{kind}.{weight.name}", weight, values, start):
            state[str(len(state))] = block
    read_blocks(state, folder)


def _zeros(count: int) -> torch.Tensor:
    """What is not read over is padding of the vocabulary: its weights and moments are 0."""
    return torch.zeros(count, dtype=torch.float32)


def _whole(key: str, data: torch.Tensor) -> ShardedTensor:
    shape = tuple(data.shape)
    return ShardedTensor(key, data, data.dtype, shape, shape, (0,) * data.dim(), axis_fragmentations=None)


def _random_states() -> dict[str, torch.Tensor]:
    """Of this rank, by generator. Nothing in training draws from them: dropout is 0, samples have their own seeds."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {f"megatron.{name}": state for name, state in get_cuda_rng_tracker().get_states().items()}


def _load_random_states(folder: Path) -> None:
    states = {name: torch.empty_like(state) for name, state in _random_states().items()}
    read_blocks({name: _whole(f"random.{dist.get_rank()}.{name}", data) for name, data in states.items()}, folder)
    torch.set_rng_state(states.pop("torch"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    get_cuda_rng_tracker().set_states({name.removeprefix("megatron."): state for name, state in states.items()})


def _together(check, folder: Path):
    """The result of `check(folder)`; where it fails on one rank, the same error on every rank."""
    try:
        result, error = check(folder), None
    except (UserError, OSError, ValueError, KeyError) as failure:
        result, error = None, failure
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error and (isinstance(error, UserError), str(error)))
    for is_users, reason in filter(None, errors):
        raise (UserError(reason) if is_users else DamagedCheckpointError(f"{folder} cannot be read: {reason}"))
    return result
