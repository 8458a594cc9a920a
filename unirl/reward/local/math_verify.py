r"""The scorer `math_verify`: the verdict of the math-verify library on the last `\boxed{...}`."""

import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from unirl.reward.local.boxed import last_boxed

# The library warns once that its time limits are off. They are, since they work by signals and so in no other thread.
for name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(name).setLevel(logging.ERROR)

MAX_CHARS = 400
MAX_NESTING = 10
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_HUGE = re.compile(
    r"\^\s*\{?\s*[-+]?\s*\{?\s*\w+\s*\}?\s*\^"  # a tower of powers
    r"|\^\s*\{?\s*[-+]?\d{4,}"
    r"|\d{3,}\s*!|\)\s*!|\}\s*!|!\s*!"
    r"|\\(?:sum|prod|int|lim|operatorname|det|binom|[dt]binom)(?![A-Za-z])|\d{200,}"
)


class MathVerifyRewardScorer:
    r"""1.0 where math-verify calls the last balanced `\boxed{...}` equal to the answer, else 0.0.

    Looser than `math_boxed` (https://github.com/huggingface/Math-Verify has the rules; its defaults are used). Boxes
    that the library would take long to read (over 400 characters, 10 levels, towers of powers, large factorials, sums
    and integrals) get 0.0 unread; the time limit of `RewardService` bounds the rest.
    """

    answer_field = "answer"

    def score(self, responses: list[str], answers: list[str]) -> list[float]:
        """One of 0.0 and 1.0 for each response; raises ValueError for an answer that the library cannot read."""
        return [self._score_one(response, answer) for response, answer in zip(responses, answers, strict=True)]

    def _score_one(self, response: str, answer: str) -> float:
        boxed_answer = last_boxed(answer)
        gold = _parse(answer if boxed_answer is None else boxed_answer)
        if not gold:
            raise ValueError(f"math-verify cannot read the prompt's answer: {answer!r}")
        found = last_boxed(response)
        if found is None or not found.strip() or _is_costly(found):
            return 0.0
        return float(verify(gold, _parse(found), timeout_seconds=None, raise_on_error=True))


def _parse(text: str) -> list[object]:
    return parse(
        rf"\boxed{{{text}}}", extraction_config=_EXTRACTION, parsing_timeout=None, raise_on_error=True
    )  # fmt: skip


def _is_costly(box: str) -> bool:
    if len(box) > MAX_CHARS or _HUGE.search(box):
        return True
    depth = deepest = 0
    for character in box:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest > MAX_NESTING
