"""Numbers as a kernel can be given them: Triton makes float32 of every Python float."""

import math
from typing import NamedTuple

import numpy as np


def two_floats(value: float) -> tuple[float, float]:
    """`value` as an unevaluated sum of two float32, 48 bits of it."""
    high = float(np.float32(value))
    return high, float(np.float32(value - high))


class ExponentScale(NamedTuple):
    """As ExponentScale in csrc/common/row_math.h: log2(e) / temperature, and the shift at which an exponential is 0."""

    high: float
    low: float
    lowest: float

    @staticmethod
    def of(temperature: float) -> "ExponentScale":
        high, low = two_floats(math.log2(math.e) / temperature)
        return ExponentScale(high, low, -127.0 / high)
