r"""The scorer `math_boxed`: strict equality of the last `\boxed{...}` with the answer."""

from unirl.reward.local.answer import answers_equal
from unirl.reward.local.boxed import last_boxed


class MathBoxedRewardScorer:
    r"""1.0 where the last balanced `\boxed{...}` of a response equals the answer, else 0.0.

    Equal as text once the notation is normalised, or else by value: exactly where both are rational, to 50 digits
    where they are not; tuples, intervals, sets, matrices and equations part by part. `unirl.reward.local.answer` has
    the rules. What is too large to evaluate (`9^9^9^9`) equals only its own text, so the time is bounded, in any
    thread and without a time limit from outside.
    """

    answer_field = "answer"

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        r"""One of 0.0 and 1.0 for each response. An answer is LaTeX or plain text, boxed or in dollars or neither.

        Raises ValueError for an answer that is empty, or lists of different lengths.
        """
        return [self._score_one(response, answer) for response, answer in zip(responses, answers, strict=True)]

    def _score_one(self, response: str, answer: str) -> float:
        boxed_answer = last_boxed(answer)
        gold = answer if boxed_answer is None else boxed_answer
        if not gold.strip():
            raise ValueError(f"the prompt's answer is empty: {answer!r}")
        found = last_boxed(response)
        if found is None or not found.strip():
            return 0.0
        return float(answers_equal(gold, found))
