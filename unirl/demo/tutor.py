"""Demonstrations of arithmetic that the demo's model is warmed up on: careful work, and lazy guesses."""

import random
from dataclasses import dataclass

_MISSES = (-4, -3, -2, -1, 1, 2, 3, 4)


def careful(expression: str) -> str:
    """The work step by step, and the result: "4 + 3 - 2" gives "4+3=7, 7-2=5. \\boxed{5}"."""
    first, *rest = expression.split()
    total, steps = int(first), []
    for operator, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if operator == "+" else total - int(term)
        steps.append(f"{total}{operator}{term}={after}")
        total = after
    return f"{', '.join(steps)}. \\boxed{{{total}}}"


@dataclass(frozen=True)
class Tutor:
    """Shows its work for a share `careful_share` of the problems; for the others it only guesses a result nearby, which
    is right for a share `lucky_share` of them.
    """

    careful_share: float
    lucky_share: float = 0.05

    def respond(self, expression: str, answer: str, rng: random.Random) -> str:
        """A demonstration for the problem `expression`, whose result is `answer`."""
        if rng.random() < self.careful_share:
            return careful(expression)
        miss = 0 if rng.random() < self.lucky_share else rng.choice(_MISSES)
        return f"\\boxed{{{int(answer) + miss}}}"
