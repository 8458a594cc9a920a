"""An actor without a model."""

import time

from unirl.cluster.seat import Seated


class Bystander(Seated):
    """Only sits."""

    def wait_s(self, seconds: float) -> None:
        time.sleep(seconds)
