"""What a run would lose with a worker, kept outside it: copies of trained models, and the calls made since."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import ray

from unirl.cluster.calls import Call
from unirl.cluster.crew import Crew
from unirl.cluster.layout import RankGrid
from unirl.errors import UserError


@dataclass
class _Copies:
    """References of what `Worker.capture` gave, by the rank that gave it. The data lie in the object store of the
    rank's node and belong to the driver: they outlive the worker.
    """

    by_rank: dict[int, ray.ObjectRef]
    calls_before: int
    """How many of the calls that are kept lead to the copies."""


@dataclass
class _Memory:
    replicated: bool
    copies: _Copies | None = None
    """None: the model is as `Worker.start` makes it."""
    unconfirmed: _Copies | None = None
    """Asked for, and perhaps not there yet."""
    calls: list[Call] = field(default_factory=list)
    """Calls since `copies` that changed the model."""


class StateMemory:
    """Brings the models of new workers to where they were: the newest copy, and the calls since once more.

    A copy is taken after every call that changes weights; nobody waits for it. Of a part of the model that several
    ranks hold, the first and the last of them give one, which are on different nodes where the part is on several.
    """

    def __init__(self, crew: Crew, grid: RankGrid):
        self._crew = crew
        self._grid = grid
        self._by_model: dict[str, _Memory] = {}

    def note(self, call: Call, *, replicated: bool | None) -> None:
        """A call has succeeded on every rank; its shares are references. `replicated`: as of `ModelFacts`."""
        for memory in self._by_model.values():
            self._confirm(memory)
        if call.effect == "none":
            return
        memory = self._by_model.setdefault(call.model, _Memory(bool(replicated)))
        memory.calls.append(call)
        if call.effect == "weights":
            ranks = {keeper for rank in range(self._grid.world_size) for keeper in self._keepers(rank, memory)}
            references = {rank: self._crew.submit(rank, "capture", call.model) for rank in sorted(ranks)}
            memory.unconfirmed = _Copies(references, len(memory.calls))

    def replay(self) -> Iterator[tuple[str, dict[int, ray.ObjectRef] | None, list[Call]]]:
        """Of each model: its name, the copy for each rank (None: as it starts), the calls to make again after that.

        Raises UserError where every copy of a part of a model was lost with its nodes.
        """
        for model, memory in self._by_model.items():
            memory.unconfirmed = None
            yield model, memory.copies and self._for_every_rank(model, memory), list(memory.calls)

    def _confirm(self, memory: _Memory) -> None:
        """Workers do what they are asked in order: when a later call is done, so is the capture."""
        if memory.unconfirmed is not None:
            memory.copies, memory.unconfirmed = memory.unconfirmed, None
            memory.calls = memory.calls[memory.copies.calls_before :]

    def _keepers(self, rank: int, memory: _Memory) -> tuple[int, ...]:
        """The ranks whose copies `rank` can go on from."""
        return self._grid.outer_replicas(rank) if memory.replicated else (rank, rank)

    def _for_every_rank(self, model: str, memory: _Memory) -> dict[int, ray.ObjectRef]:
        by_rank = memory.copies.by_rank
        available = _available(by_rank)
        chosen = {}
        for rank in range(self._grid.world_size):
            keepers = [keeper for keeper in self._keepers(rank, memory) if keeper in available]
            if not keepers:
                raise UserError(
                    f"the state of rank {rank} of {model} was lost with the nodes that kept it; go on from the last "
                    "checkpoint with resume=auto"
                )
            chosen[rank] = by_rank[keepers[0]]
        return chosen


def _available(by_rank: Mapping[int, ray.ObjectRef]) -> set[int]:
    """The ranks whose objects can still be fetched; known without fetching them."""
    references = list(by_rank.values())
    locations = ray.experimental.get_object_locations(references)
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    there, _ = ray.wait(references, num_returns=len(references), timeout=0, fetch_local=False)
    inline = {reference for reference in there if not locations[reference]["node_ids"]}  # small ones lie in the driver
    return {
        rank
        for rank, reference in by_rank.items()
        if reference in inline or alive.intersection(locations[reference]["node_ids"])
    }
