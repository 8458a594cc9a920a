r"""The scorer `reasoning_gym`: the library's own verifier on the last `\boxed{...}`."""

import functools
import json
from typing import Any

import reasoning_gym

from unirl.errors import UserError
from unirl.reward.local.boxed import last_boxed


class ReasoningGymRewardScorer:
    r"""1.0 where the problem's own verifier gives the last balanced `\boxed{...}` full marks, else 0.0.

    Partial grades are not paid: most families give some for an answer of the right form, or for a wrong one that
    contains the right digits (112 for 12). https://github.com/open-thought/reasoning-gym
    """

    answer_field = None

    def score(self, responses: list[str], answers: list[dict[str, Any]]) -> list[float]:
        """One of 0.0 and 1.0 for each response; `answers` are whole prompt records of data.kind=reasoning_gym.

        Raises UserError for a record without the library's task; errors of a family's verifier pass through.
        """
        return [self._score_one(response, record) for response, record in zip(responses, answers, strict=True)]

    def _score_one(self, response: str, record: dict[str, Any]) -> float:
        task = record.get("task")
        if not isinstance(task, dict) or not {"family", "params", "answer"} <= task.keys():
            raise UserError(
                "reward.scorer=reasoning_gym: a prompt's record has no reasoning_gym task: use data.kind=reasoning_gym"
            )
        found = last_boxed(response)
        if found is None or not found.strip():
            return 0.0
        entry = {"question": record["prompt"], "answer": task["answer"], "metadata": record["metadata"]}
        verifier = _verifier(task["family"], json.dumps(task["params"]))
        return float(verifier.score_answer(found.strip(), entry) >= 1.0)


@functools.cache
def _verifier(family: str, params: str) -> Any:
    return reasoning_gym.create_dataset(family, **json.loads(params), seed=0, size=1)
