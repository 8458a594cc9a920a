"""Weight sync from the policy, wherever its ranks run, to the engine, which knows the way to where it samples."""

from collections.abc import Iterator
from typing import Protocol

import torch

from unirl.rollout.engine import RolloutEngine


class WeightSource(Protocol):
    """The policy under training."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class WeightSync:
    """Hands the actor's weights, under their Hugging Face names, to the engine."""

    def __init__(self, actor: WeightSource, engine: RolloutEngine):
        self.actor = actor
        self.engine = engine

    def publish(self, version: int) -> None:
        """After this, every token is drawn from the actor's present weights and is marked `version`."""
        self.engine.update_weights(self.actor.export_weights(), version)
