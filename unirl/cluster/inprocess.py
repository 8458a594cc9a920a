"""The worker group of one process: the same worker without Ray, for one device and for plain debuggers."""

from collections.abc import Iterator
from typing import Any

import torch

from unirl.cluster.berth import Berth
from unirl.cluster.calls import Call
from unirl.cluster.layout import RankGrid
from unirl.cluster.worker import MakeModels, Worker


class InProcessGroup:
    """One worker in the process of the driver; a `WorkerGroup` that copies nothing."""

    def __init__(self, make_models: MakeModels):
        self.grid = RankGrid()
        self._worker = Worker(make_models)
        self.facts = self._worker.start()

    def run(self, call: Call) -> list[Any]:
        """See `WorkerGroup.run`."""
        return [self._worker.call(*call.by_rank(self.grid)[0])]

    def stream(self, model: str, method: str, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        """See `WorkerGroup.stream`."""
        return self._worker.iterate(model, method)

    def berths(self) -> list[Berth]:
        """See `WorkerGroup.berths`."""
        return []

    def close(self) -> None:
        """See `WorkerGroup.close`."""
        self._worker.stop()
