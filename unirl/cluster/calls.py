"""What a driver asks of the workers of a run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

import torch

from unirl.cluster.berth import Berth
from unirl.cluster.layout import RankGrid

Answers = Literal["first", "reporting", "all"]
"""Whose results a call returns: of rank 0, of the reporting rank of each data-parallel index, or of every rank."""

Effect = Literal["none", "gradients", "weights"]
"""What a call changes in its model; `weights` stands for all that a checkpoint holds."""


@dataclass(frozen=True)
class RankCall:
    """What one rank does of a `Call`."""

    model: str
    method: str
    args: tuple[Any, ...]
    has_share: bool
    answers: bool


@dataclass(frozen=True)
class Call:
    """A method of a hosted model, called on every rank: `method(share, *args)`, or `method(*args)` without shares.

    shares: one argument for each data-parallel index; every rank of that index gets it.
    before_retry: makes room for a second attempt, where the first one may have left something behind.
    """

    model: str
    method: str
    args: tuple[Any, ...] = ()
    shares: tuple[Any, ...] | None = None
    answers: Answers = "first"
    effect: Effect = "none"
    before_retry: Callable[[], None] | None = None

    def __str__(self) -> str:
        return f"{self.model}.{self.method}"

    def answering_ranks(self, grid: RankGrid) -> tuple[int, ...]:
        """The ranks whose results the call returns, in that order."""
        if self.answers == "first":
            return (0,)
        return grid.reporting_ranks if self.answers == "reporting" else tuple(range(grid.world_size))

    def by_rank(self, grid: RankGrid) -> list[tuple[RankCall, Any]]:
        """What each rank is to do, and its share."""
        answering = set(self.answering_ranks(grid))
        silent, answers = (
            RankCall(self.model, self.method, self.args, self.shares is not None, answers) for answers in (False, True)
        )
        return [
            (answers if rank in answering else silent, self.shares and self.shares[grid.coordinates(rank).dp])
            for rank in range(grid.world_size)
        ]


@dataclass(frozen=True)
class ModelFacts:
    """What a driver knows of a hosted model; None where the model has no such thing.

    vocab_size: token ids. temperature: divides a policy's logits. shape, cost: what a plan of micro-batches asks.
    replicated: whether data- and context-parallel ranks hold the same state; None where nothing is trained.
    """

    vocab_size: int
    temperature: float | None = None
    shape: Any = None
    cost: Any = None
    replicated: bool | None = None

    @staticmethod
    def of(model: Any) -> "ModelFacts":
        """The attributes of these names of a model."""
        return ModelFacts(**{item.name: getattr(model, item.name, None) for item in fields(ModelFacts)})


class WorkerGroup(Protocol):
    """The workers of a run, one for each rank, which all host the same models by name.

    grid: how the ranks split the work. facts: of each model.
    """

    grid: RankGrid
    facts: dict[str, ModelFacts]

    def run(self, call: Call) -> list[Any]:
        """Make the call on every rank; the results of the ranks that `call.answers` names.

        Raises what the method raised.
        """

    def stream(self, model: str, method: str, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The pairs (name, tensor) that the iterator `method()` of rank 0 gives; every rank runs it along.

        At most two buckets of about `bucket_bytes` are held on the way.
        """

    def berths(self) -> list[Berth]:
        """Places for the run's servers, in their order, asked for once; none where servers start in this process."""

    def close(self) -> None:
        """End the workers; may be called twice."""
