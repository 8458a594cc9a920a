"""Where the entries of a rank's weights stand in the weights of the whole model: what makes a checkpoint independent of
the parallel sizes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from unirl.train.megatron.architecture import Architecture
from unirl.train.megatron.model import PackedModel, ValueModel
from unirl.train.megatron.names import GateUp, WeightMap, weight_maps
from unirl.train.megatron.weights import VALUE_HEAD, global_name, tensor_group

_TIED_HEAD = "output_layer.weight"
_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Block:
    """Entries [start, stop) of a rank's flattened weight: a rectangle of `shape` at `offset` in the whole weight."""

    start: int
    stop: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """A rank's shard, of `shape`, in the whole weight, of `global_shape` and without padding.

    runs: (first row of the shard, first row in the whole weight, number of rows) of each run of rows that follow one
        another in both; rows in no run are padding.
    column: of the whole weight, where the columns of the shard begin.
    """

    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]
    column: int = 0

    @staticmethod
    def of(weight: WeightMap | None, shape: Sequence[int], rank: int, size: int) -> "Placement":
        """Of the shard of tensor-parallel rank `rank` of `size`; without a map every rank has the whole weight."""
        rows, *rest = shape = tuple(shape)
        dim = None if weight is None else weight.tp_dim
        if dim is None or (size == 1 and weight.padding is None):
            return Placement(shape, shape, ((0, 0, rows),))
        if dim == 1:
            return Placement(shape, (rows, rest[0] * size), ((0, 0, rows),), column=rank * rest[0])
        if weight.padding is not None:
            present = min(max(weight.padding.size - rank * rows, 0), rows)
            runs = ((0, rank * rows, present),) if present else ()
            return Placement(shape, (weight.padding.size, *rest), runs)
        parts = 2 if isinstance(weight.layout, GateUp) else 1  # gate and up are cut over the ranks one by one
        part = rows // parts
        runs = tuple((index * part, (index * size + rank) * part, part) for index in range(parts))
        return Placement(shape, (rows * size, *rest), runs)

    @property
    def row_length(self) -> int:
        """Entries of a row of the shard; 1 of a vector."""
        return self.shape[1] if len(self.shape) == 2 else 1

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks that hold the entries [start, stop) of the flattened shard, padding left out."""
        length = self.row_length
        for first, global_first, count in self.runs:
            at, end = max(start, first * length), min(stop, (first + count) * length)
            while at < end:
                row, column = divmod(at, length)
                if column or end - at < length:  # a part of a row
                    after, shape = min(end, (row + 1) * length), (1, min(end, (row + 1) * length) - at)
                else:
                    rows = (end - at) // length
                    after, shape = at + rows * length, (rows, length)
                offset = (global_first + row - first, self.column + column)
                dims = len(self.shape)
                yield Block(at, after, shape[:dims], offset[:dims])
                at = after


@dataclass(frozen=True)
class PlacedWeight:
    """A parameter of this rank.

    name: of the whole weight. A tied head that lies on a pipeline stage of its own has the name of the embedding.
    placement: of this rank's shard.
    replicas: the ranks that hold the same shard.
    is_first: whether this is the tensor-parallel rank, and the stage, that writes the shard.
    """

    name: str
    parameter: torch.nn.Parameter
    placement: Placement
    replicas: dist.ProcessGroup
    is_first: bool


def placed_weights(chunks: Sequence[PackedModel]) -> list[PlacedWeight]:
    """Every parameter of this rank's chunks."""
    model = chunks[0]
    maps = {weight.name: weight for weight in weight_maps(model.architecture, model.vocab_size)}
    return [
        _placed(model.architecture, maps.get(name), name, parameter)
        for name, parameter in ((global_name(chunk, n), p) for chunk in chunks for n, p in chunk.named_parameters())
    ]


def whole_names(chunks: Sequence[PackedModel]) -> set[str]:
    """The names of all weights of the whole model, whichever rank holds them."""
    model = chunks[0]
    names = {weight.name for weight in weight_maps(model.architecture, model.vocab_size) if weight.exported}
    return names | ({f"{VALUE_HEAD}weight", f"{VALUE_HEAD}bias"} if isinstance(model, ValueModel) else set())


def _placed(architecture: Architecture, weight: WeightMap | None, name: str, parameter) -> PlacedWeight:
    repeats = architecture.tied and name == _TIED_HEAD
    group = parallel_state.get_tensor_model_parallel_group() if weight is None else tensor_group(weight)
    is_expert = weight is not None and weight.expert is not None
    return PlacedWeight(
        _EMBEDDING if repeats else name,
        parameter,
        Placement.of(weight, parameter.shape, group.rank(), group.size()),
        parallel_state.get_expert_data_parallel_group()
        if is_expert
        else parallel_state.get_data_parallel_group(with_context_parallel=True),
        is_first=not repeats and (group.rank() == 0 or (weight is not None and weight.tp_dim is not None)),
    )
