"""A calculator as a tool: arithmetic that takes several turns, one operation a turn."""

import re
from collections.abc import Mapping
from typing import Any

from unirl.rollout.environment import Message, StepResult

_CALL = re.compile(r"calc\((-?\d{1,18})([+*-])(-?\d{1,18})\)")
_ANSWER = re.compile(r"\\boxed\{(-?\d{1,18})\}")
_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

USAGE = "expected calc(a+b), calc(a-b), calc(a*b) or \\boxed{answer}"
"""What the tool says to a response that is neither a call nor an answer."""


class Calculator:
    r"""The policy calls `calc(34+57)` and reads the result in a message of role `tool`, until it answers `\boxed{91}`.

    The last boxed integer of a response ends the episode: reward 1 where it equals the record's `answer`, else 0. A
    response without one is searched for its last call, which costs `call_cost` (a reward of -call_cost); a call takes
    one operation on two integers of at most 18 digits. A response with neither gets the usage and costs the same.
    """

    def __init__(self, call_cost: float = 0.0):
        self._call_cost = call_cost

    def reset(self, record: Mapping[str, Any], seed: int) -> list[Message]:
        """Raises ValueError where the record's answer is no integer."""
        self._answer = int(record["answer"])
        return []

    def step(self, response: str) -> StepResult:
        if answers := _ANSWER.findall(response):
            return StepResult(reward=float(int(answers[-1]) == self._answer), done=True)
        calls = _CALL.findall(response)
        content = _result(*calls[-1]) if calls else USAGE
        return StepResult(reward=-self._call_cost, done=False, observation=[{"role": "tool", "content": content}])


def _result(left: str, operator: str, right: str) -> str:
    return str(_OPERATIONS[operator](int(left), int(right)))
