import json

import pytest
import reasoning_gym

from unirl.errors import UserError
from unirl.reward import RewardService
from unirl.reward.local.reasoning_gym import ReasoningGymRewardScorer


def make_record(family: str, **params) -> dict:
    """A record as `data.kind=reasoning_gym` makes it, once it went through JSON."""
    entry = reasoning_gym.create_dataset(family, **params, seed=1, size=1)[0]
    record = {
        "prompt": entry["question"],
        "answer": str(entry["answer"]),
        "metadata": entry["metadata"],
        "task": {"family": family, "params": params, "answer": entry["answer"]},
    }
    return json.loads(json.dumps(record))


@pytest.mark.parametrize(
    "family", ["chain_sum", "fraction_simplification", "gcd", "simple_equations", "basic_arithmetic"]
)
def test_the_librarys_own_answer_gets_full_marks(family):
    record = make_record(family)
    scorer = ReasoningGymRewardScorer()
    assert scorer.score([rf"So \boxed{{{record['answer']}}}."], [record]) == [1.0]
    assert (
        scorer.score([rf"So \boxed{{1{record['answer']}}}.", record["answer"], r"\boxed{}"], [record] * 3) == [0.0] * 3
    )


def test_in_the_service():
    records = [make_record("chain_sum", min_terms=3, max_terms=3), make_record("gcd")]
    with RewardService("reasoning_gym", num_workers=1) as reward:
        responses = [rf"\boxed{{{record['answer']}}}" for record in records]
        assert reward.score(responses, records) == [1.0, 1.0]
        with pytest.raises(UserError, match=r"use data\.kind=reasoning_gym"):
            reward.score(["1"], [{"prompt": "1+1", "answer": "2"}])
