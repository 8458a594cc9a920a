"""Numbers as a kernel can be given them: Triton makes float32 of every Python float."""

import math
from typing import NamedTuple

import numpy as np


def two_floats(value: float) -> tuple[float, float]:
    """`value` as an unevaluated sum of two float32, 48 bits of it."""
    high = float(np.float32(value))
    return high, float(np.float32(value - high))


class ExponentScale(NamedTuple):
    """log2(e) / temperature as a sum of two float32, both > 0: -inf times each is -inf.

    lowest: a shift of a logit at which its exponential is 0 in float32, whose smallest number is 2^-149.
    """

    high: float
    low: float
    lowest: float

    @staticmethod
    def of(temperature: float) -> "ExponentScale":
        scale = math.log2(math.e) / temperature
        high = np.float32(scale)
        if float(high) > scale:
            high = np.nextafter(high, np.float32(0))
        low = max(np.float32(scale - float(high)), np.finfo(np.float32).tiny)
        return ExponentScale(float(high), float(low), -152.0 / float(high))
