import json

import pytest
import reasoning_gym

from unirl.config.schema import DataConfig
from unirl.data import load_prompts
from unirl.data.reasoning_gym import verify
from unirl.errors import UserError

SMALL = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}  # 10 * 2 * 10 questions


def load(tokenizer, split="train", **keys):
    keys = {"tasks": {"chain_sum": {}, "gcd": None}, "size": 60, "heldout_size": 21, **keys}
    return load_prompts(DataConfig(kind="reasoning_gym", **keys), tokenizer, split=split)


def questions(dataset):
    return [prompt.record["prompt"] for prompt in dataset]


def test_splits_have_their_size_take_turns_and_are_disjoint(tokenizer):
    train, heldout = load(tokenizer), load(tokenizer, "heldout")
    assert [prompt.record["data_source"] for prompt in train][:4] == ["chain_sum", "gcd"] * 2
    assert (len(train), len(heldout)) == (60, 21)
    assert not set(questions(train)) & set(questions(heldout))
    assert len(set(questions(train))) == 60


def test_problems_are_decided_by_the_seed(tokenizer):
    assert load(tokenizer).fingerprint() == load(tokenizer).fingerprint()
    assert not set(questions(load(tokenizer))) & set(questions(load(tokenizer, seed=1)))


def test_heldout_does_not_depend_on_the_training_size(tokenizer):
    assert questions(load(tokenizer, "heldout", size=5)) == questions(load(tokenizer, "heldout", size=500))


def test_a_small_space_is_split_and_said(tokenizer):
    train = load(tokenizer, tasks=SMALL, size=1000, heldout_size=50)
    heldout = load(tokenizer, "heldout", tasks=SMALL, size=1000, heldout_size=50)
    assert len(heldout) == 50
    assert 140 <= len(train) <= 150
    assert not set(questions(train)) & set(questions(heldout))
    assert train.report.duplicates > 0
    assert train.report.in_heldout > 0
    assert f"chain_sum: {len(train)} of 1,000 problems" in train.report.summary()
    assert not heldout.report.notes


def test_a_space_that_the_heldout_split_takes_whole_is_an_error(tokenizer):
    tasks = {"chain_sum": {**SMALL["chain_sum"], "min_terms": 1, "max_terms": 1}}
    with pytest.raises(UserError, match=r"no usable prompt is left.*same question as a held-out problem"):
        load(tokenizer, tasks=tasks)


def test_records_are_json_and_verified_by_the_library(tokenizer):
    tasks = {"chain_sum": {"min_terms": 3}, "fraction_simplification": {}, "propositional_logic": {}}
    for prompt in load(tokenizer, tasks=tasks, size=6):
        record = json.loads(json.dumps(prompt.record))
        right = record["answer"] or record["metadata"]["example_answer"]
        assert verify(record, right) == 1.0
        assert verify(record, None) < 0.5  # some families give 0.01 for anything
        assert verify(record, "certainly not") < 0.5
    assert record["task"] == {"family": "propositional_logic", "params": {}, "answer": None}


def test_verifier_is_the_familys_own(tokenizer):
    record = load(tokenizer, tasks={"chain_sum": {}}, size=1)[0].record
    entry = {"question": record["prompt"], "answer": record["answer"], "metadata": record["metadata"]}
    library = reasoning_gym.create_dataset("chain_sum")
    for answer in (record["answer"], f" {record['answer']}.0", "12345678", ""):
        assert verify(record, answer) == library.score_answer(answer, entry)


def test_verify_needs_a_record_of_this_source():
    with pytest.raises(UserError, match=r"data\.kind=reasoning_gym"):
        verify({"prompt": "1+1", "answer": "2"}, "2")


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "data.tasks is empty"),
        ({"chain_sun": {}}, r"data\.tasks\.chain_sun: .*did you mean chain_sum\?"),
        ({"chain_sum": {"min_term": 2}}, r"data\.tasks\.chain_sum has no parameter min_term; did you mean min_terms\?"),
        ({"chain_sum": {"min_terms": 0}}, "min_terms must be positive"),
        ({"chain_sum": {"min_terms": "two"}}, r"data\.tasks\.chain_sum: reasoning_gym refuses"),
        ({"chain_sum": {"seed": 2}}, r"decided by data\.seed"),
        ({"chain_sum": 3}, "must be the family's parameters"),
        ({"rearc": {}}, r"data\.tasks\.rearc: .*choose another family"),
    ],
)
def test_tasks_that_cannot_be_made(tokenizer, tasks, message):
    with pytest.raises(UserError, match=message):
        load(tokenizer, tasks=tasks, size=1, heldout_size=1)


def test_families_that_depend_on_the_hash_seed_say_so(tokenizer, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    keys = {"tasks": {"ransom_note": {}}, "size": 2, "heldout_size": 2, "max_prompt_tokens": 10_000}
    assert "PYTHONHASHSEED=0" in load(tokenizer, **keys).report.summary()
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert "PYTHONHASHSEED" not in load(tokenizer, **keys).report.summary()


def test_a_prompt_file_belongs_to_jsonl(tokenizer):
    with pytest.raises(UserError, match=r"leave eval\.path null"):
        load_prompts(DataConfig(kind="reasoning_gym", tasks=SMALL), tokenizer, split="heldout", path="x.jsonl")
