"""From the name of a loss to its algorithm."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unirl.algorithms.algorithm import PolicyAlgorithm


def algorithm_class(loss: str) -> type["PolicyAlgorithm"]:
    """The algorithm of `loss`: the class `LOSS` of the file `unirl/algorithms/<loss>.py`."""
    return getattr(import_module(f"unirl.algorithms.{loss}"), loss.upper())
