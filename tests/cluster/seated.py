"""An actor without a model."""

from unirl.cluster.seat import Seated


class Bystander(Seated):
    """Only sits."""
