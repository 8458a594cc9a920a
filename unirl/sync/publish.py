"""Weight sync from the policy, wherever its ranks run, to the engine, which knows the way to where it samples."""

from unirl.rollout.engine import RolloutEngine
from unirl.rollout.weights import WeightSource


class WeightSync:
    """Hands the weights of the policy under training to the engine."""

    def __init__(self, weights: WeightSource, engine: RolloutEngine):
        self.weights = weights
        self.engine = engine

    def publish(self, version: int) -> None:
        """After this, every token is drawn from the policy's present weights and is marked `version`."""
        self.engine.update_weights(self.weights, version)
