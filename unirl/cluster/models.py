"""The models of a worker group as the driver sees them: the methods of the models themselves, called on every rank."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unirl.cluster.calls import Call, WorkerGroup

BUCKET_BYTES = 256 * 2**20
"""Weights on their way through the driver come in buckets of about this size."""


class HostedProxy:
    """A model that a worker group hosts under `name`."""

    def __init__(self, group: WorkerGroup, name: str):
        self.group = group
        self.name = name

    @property
    def vocab_size(self) -> int:
        """Token ids of the model, padding excluded."""
        return self.group.facts[self.name].vocab_size

    @property
    def shape(self) -> Any:
        """What the parallel layout asks of micro-batches: a `ParallelShape`."""
        return self.group.facts[self.name].shape

    @property
    def cost(self) -> Any:
        """What a pass over a tree costs: a `CostModel`."""
        return self.group.facts[self.name].cost

    def _deal(self, method: str, micro_batches: Sequence[Any], *args: Any, **options: Any) -> list[Any]:
        """Results of all micro-batches, in their order, from ranks that each get their data-parallel index's run."""
        dp = self.group.grid.dp
        length, rest = divmod(len(micro_batches), dp)
        if rest or not length:
            raise ValueError(
                f"{self.name}.{method}: found {len(micro_batches)} micro-batches, expected a multiple of the "
                f"data-parallel size {dp}"
            )
        shares = tuple(list(micro_batches[rank * length : (rank + 1) * length]) for rank in range(dp))
        found = self.group.run(Call(self.name, method, args, shares, answers="reporting", **options))
        return [result for results in found for result in results]


class PolicyProxy(HostedProxy):
    """A policy; the methods are those of `MegatronPolicy`."""

    @property
    def temperature(self) -> float:
        """Divides the logits before every log-prob."""
        return self.group.facts[self.name].temperature

    def log_probs(self, micro_batches: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probs and entropies (in nats) of the response tokens, [R] float32 each, for every micro-batch."""
        return self._deal("log_probs", micro_batches)


class TrainedProxy(HostedProxy):
    """A model under training; the methods are those of `Trained`."""

    def forward_backward(self, micro_batches: Sequence[Any], loss_fn: Callable) -> list[dict]:
        """Set the gradients to those of the sum of the losses of `micro_batches`; returns the metrics of each.

        `loss_fn` is pickled where there are several processes.
        """
        return self._deal("forward_backward", micro_batches, loss_fn, effect="gradients")

    def optimizer_step(self) -> Any:
        """Clip the gradients and update the weights. Raises RuntimeError where the ranks tell of different steps."""
        results = self.group.run(Call(self.name, "optimizer_step", answers="all", effect="weights"))
        told = [repr(result) for result in results]  # repr: not a number equals itself
        if len(set(told)) > 1:
            other = next(rank for rank, text in enumerate(told) if text != told[0])
            raise RuntimeError(
                f"{self.name}.optimizer_step: rank 0 tells of {told[0]}, rank {other} of {told[other]}: the ranks no "
                "longer train the same model; go on from the last checkpoint with resume=auto"
            )
        return results[0]

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the state of all ranks into the existing `folder`, which they all see; its files by name."""
        folder = folder.absolute()
        return self.group.run(Call(self.name, "save", (folder,), before_retry=partial(_empty, folder)))[0]

    def begin_save(self, folder: Path) -> None:
        """Start to write into the existing `folder`; every rank copies its share first."""
        folder = folder.absolute()
        self.group.run(Call(self.name, "begin_save", (folder,), before_retry=partial(_empty, folder)))

    def save_done(self) -> bool:
        """Whether `finish_save` has nothing to wait for on any rank."""
        return all(self.group.run(Call(self.name, "save_done", answers="all")))

    def finish_save(self) -> dict[str, Any]:
        """Wait for all ranks; the files by name. Raises CheckpointWriteError, also where a rank was replaced since."""
        return self.group.run(Call(self.name, "finish_save"))[0]

    def check_files(self, folder: Path, files: Mapping[str, Any]) -> str | None:
        """What is wrong with a file of a saved state, of which every rank reads its share; None where all are whole."""
        found = self.group.run(Call(self.name, "check_files", (folder.absolute(), dict(files)), answers="all"))
        return next(filter(None, found), None)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, in any layout."""
        self.group.run(Call(self.name, "load", (folder.absolute(),), effect="weights"))


class ActorProxy(TrainedProxy, PolicyProxy):
    """The policy under training; the methods are those of `MegatronActor`."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of every weight, in a fixed order, in the dtype of training."""
        return self.group.stream(self.name, "export_weights", BUCKET_BYTES)

    @property
    def weights(self) -> "HostedWeights":
        """The same where they are: a `WeightSource`."""
        return HostedWeights(self.group, self.name)

    def export_hf(self, folder: Path) -> None:
        """Write a new Hugging Face folder: weights, config and tokenizer. Raises FileExistsError where it exists."""
        folder = folder.absolute()
        retry = partial(shutil.rmtree, folder, ignore_errors=True)
        self.group.run(Call(self.name, "export_hf", (folder,), before_retry=retry))


class HostedWeights:
    """The weights of a policy that a worker group hosts; a `WeightSource` with a stage for each pipeline stage."""

    def __init__(self, group: WorkerGroup, name: str):
        self._group = group
        self._name = name
        self.num_stages = group.grid.pp

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._group.stream(self._name, "export_weights", BUCKET_BYTES)

    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """See `WeightSource.shapes`: each stage's first rank tells them from its own shards."""
        results = self._group.run(Call(self._name, "weight_shapes", answers="all"))
        first_ranks = (self._group.grid.rank(dp=0, pp=stage) for stage in range(self.num_stages))
        return [shape for rank in first_ranks for shape in results[rank]]

    def feed(self, consume: Callable[[Iterator[tuple[str, torch.Tensor]]], Any], stage: int) -> Any:
        """See `WeightSource.feed`: the first rank of the stage consumes."""
        results = self._group.run(Call(self._name, "feed_weights", (consume, stage), answers="all"))
        return results[self._group.grid.rank(dp=0, pp=stage)]


class CriticProxy(TrainedProxy):
    """The critic under training; the methods are those of `MegatronCritic`."""

    def values(self, micro_batches: Sequence[Any]) -> list[torch.Tensor]:
        """Values of the response tokens, [R] float32, for every micro-batch."""
        return self._deal("values", micro_batches)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
