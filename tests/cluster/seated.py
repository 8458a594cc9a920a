"""An actor without a model."""

import time

from unirl.cluster.seat import Seated


class Bystander(Seated):
    """Only sits."""

    def wait_s(self, seconds: float) -> None:
        time.sleep(seconds)

    def flood(self, lines: int) -> None:
        """Computes and prints without a pause."""
        for number in range(lines):
            print(f"line {number} of {lines}", "." * 200, flush=True)
