"""Weight sync where the trainer has all weights in this process; the engine knows the way to where it samples."""

from unirl.rollout.engine import RolloutEngine
from unirl.train.megatron.actor import MegatronActor


class WeightSync:
    """Hands the actor's weights, under their Hugging Face names, to the engine."""

    def __init__(self, actor: MegatronActor, engine: RolloutEngine):
        self.actor = actor
        self.engine = engine

    def publish(self, version: int) -> None:
        """After this, every token is drawn from the actor's present weights and is marked `version`."""
        self.engine.update_weights(self.actor.export_weights(), version)
