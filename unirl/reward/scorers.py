"""What a scorer is, and how its name becomes a class."""

import inspect
from importlib import import_module
from typing import Any, Protocol

from unirl.errors import UserError

BUILT_IN = {
    "math_boxed": "unirl.reward.local.math_boxed.MathBoxedRewardScorer",
    "math_verify": "unirl.reward.local.math_verify.MathVerifyRewardScorer",
    "reasoning_gym": "unirl.reward.local.reasoning_gym.ReasoningGymRewardScorer",
}


class Scorer(Protocol):
    """Grades responses. Made without arguments, once in each scorer process, and called with one response at a time.

    `answer_field` names the field of the prompt record that is passed as the answer (numbers as text, all else as it
    stands in the record); None passes the whole record. A class without the attribute gets `answer`.

    An exception means that there is no verdict: the response gets NaN and the error is counted and shown.
    """

    answer_field: str | None = "answer"

    def score(self, responses: list[str], answers: list[Any]) -> list[float]:
        """One reward for each response."""
        ...


def load_scorer(name: str) -> type[Scorer]:
    """The class that `reward.scorer` names: a built-in name or a dotted path. Raises UserError where it fails."""
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise UserError(
            f"reward.scorer={name}: found no such scorer, expected one of {', '.join(BUILT_IN)} "
            "or the dotted path of a class, e.g. my_package.rewards.MyScorer"
        )
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise UserError(f"reward.scorer={name}: cannot import {module_name}: {error}") from error
    scorer = getattr(module, class_name, None)
    if not inspect.isclass(scorer):
        found = "nothing" if scorer is None else f"a {type(scorer).__name__}"
        raise UserError(f"reward.scorer={name}: expected a class {class_name} in {module_name}, found {found}")
    if not callable(getattr(scorer, "score", None)):
        raise UserError(f"reward.scorer={name}: the class has no method score(responses, answers)")
    return scorer
