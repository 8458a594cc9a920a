"""Weight sync to a rollout engine in the process of the driver."""

from collections.abc import Iterator
from typing import Protocol

import torch

from unirl.rollout.engine import RolloutEngine


class WeightSource(Protocol):
    """The policy under training, wherever its ranks run."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class InProcessSync:
    """Hands the actor's weights, under their Hugging Face names, to an engine in the same process."""

    def __init__(self, actor: WeightSource, engine: RolloutEngine):
        self.actor = actor
        self.engine = engine

    def publish(self, version: int) -> None:
        """After this, every token is drawn from the actor's present weights and is marked `version`."""
        self.engine.update_weights(self.actor.export_weights(), version)
