r"""The scorer `reasoning_gym`: the library's own verifier on the last `\boxed{...}`."""

import functools
import json
from typing import Any

import reasoning_gym

from unirl.errors import UserError
from unirl.reward.local.boxed import last_boxed


class ReasoningGymRewardScorer:
    r"""The grade that the problem's own verifier in reasoning-gym gives to the last balanced `\boxed{...}`.

    The answer must be in a box: without one the reward is 0.0. Most families give 1.0 or a small consolation (0.01 to
    0.1) for an answer of the right form; `score` pays the library's grade only where it is graded in earnest: grades
    below `MIN_GRADE` become 0.0. https://github.com/open-thought/reasoning-gym
    """

    answer_field = None
    MIN_GRADE = 0.2

    def score(self, responses: list[str], answers: list[dict[str, Any]]) -> list[float]:
        """Grades in [0, 1]; `answers` are whole prompt records of data.kind=reasoning_gym.

        Raises UserError for a record without the library's task; errors of a family's verifier pass through.
        """
        return [self._score_one(response, record) for response, record in zip(responses, answers, strict=True)]

    def _score_one(self, response: str, record: dict[str, Any]) -> float:
        task = record.get("task")
        if not isinstance(task, dict) or not {"family", "params", "answer"} <= task.keys():
            raise UserError(
                "reward.scorer=reasoning_gym: the prompt's record has no reasoning_gym task: use data.kind=reasoning_gym"
            )
        found = last_boxed(response)
        if found is None or not found.strip():
            return 0.0
        entry = {"question": record["prompt"], "answer": task["answer"], "metadata": record["metadata"]}
        verifier = _verifier(task["family"], json.dumps(task["params"]))
        grade = float(verifier.score_answer(found.strip(), entry))
        return grade if grade >= self.MIN_GRADE else 0.0


@functools.cache
def _verifier(family: str, params: str) -> Any:
    return reasoning_gym.create_dataset(family, **json.loads(params), seed=0, size=1)
