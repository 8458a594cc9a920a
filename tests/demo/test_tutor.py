"""Demonstrations: careful work is right in the eyes of the library's own verifier, lazy guesses mostly are not."""

import random

import pytest

from unirl.data import LoadReport
from unirl.data.reasoning_gym import make_problems
from unirl.demo.arith import DATA
from unirl.demo.tutor import Tutor, careful
from unirl.reward.local.reasoning_gym import ReasoningGymRewardScorer


@pytest.fixture(scope="module")
def records():
    return [record for _, record in make_problems(DATA, "train", LoadReport("test", DATA.max_prompt_tokens))]


def mean_grade(responses, records):
    return sum(ReasoningGymRewardScorer().score(responses, records)) / len(records)


@pytest.mark.parametrize(
    ("expression", "work"),
    [
        ("4 + 3 - 2", "4+3=7, 7-2=5. \\boxed{5}"),
        ("0 - 9 - 9", "0-9=-9, -9-9=-18. \\boxed{-18}"),
        ("12 + 5", "12+5=17. \\boxed{17}"),
    ],
)
def test_careful_work(expression, work):
    assert careful(expression) == work


def test_careful_work_is_right_for_every_training_problem(records):
    assert mean_grade([careful(record["metadata"]["expression"]) for record in records], records) == 1.0


def test_a_lazy_tutor_is_right_as_often_as_it_says(records):
    tutor, rng = Tutor(careful_share=0.1, lucky_share=0.2), random.Random(0)
    responses = [tutor.respond(record["metadata"]["expression"], record["answer"], rng) for record in records]
    assert sum("=" in response for response in responses) / len(records) == pytest.approx(0.1, abs=0.02)
    assert mean_grade(responses, records) == pytest.approx(0.1 + 0.9 * 0.2, abs=0.03)
