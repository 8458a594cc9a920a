"""Which groups are trained on: the selection on parts made by hand, then whole runs with a filter."""

import json
import math
import subprocess
from dataclasses import replace
from itertools import chain

import pytest
import torch

from tests.train.conftest import make_part
from tests.trainer.conftest import ENVIRONMENT, read_metrics, wait_for_lines
from tests.trainer.filters import even_answer
from unirl import train_ar
from unirl.config.schema import AlgorithmConfig, TrainConfig
from unirl.data import PromptSampler
from unirl.observe.metrics import timeless
from unirl.trainer.dynamic_sampling import GroupSelection, prompts_for
from unirl.trainer.group_filter import nonzero_variance
from unirl.types import Part

DIFFERENT, EQUAL = [0.0, 1.0], [1.0, 1.0]


def selection_of(keep=nonzero_variance, batch_size: int = 4, **keys) -> GroupSelection:
    return GroupSelection(TrainConfig(batch_size=batch_size, algorithm=AlgorithmConfig(**keys)), keep)


def round_of(*groups: list[float], first_group: int = 0) -> Part:
    part = make_part([([1, 2], [[3, 4]] * len(rewards)) for rewards in groups], rewards=[*chain(*groups)])
    return replace(part, text=replace(part.text, group_ids=part.text.group_ids + first_group))


def test_without_a_filter_one_round_is_all():
    selection = selection_of(keep=None)
    assert selection.next_round() == 4
    selection.add(round_of(EQUAL, DIFFERENT, EQUAL, EQUAL))
    assert selection.next_round() == 0
    assert torch.equal(selection.trained().rewards, selection.drawn().rewards)
    assert selection.metrics() == {}
    assert selection.shortfall() is None


def test_rounds_until_the_batch_is_full_and_the_last_surplus_is_dropped():
    selection = selection_of(batch_size=3)
    selection.add(round_of(EQUAL, DIFFERENT, EQUAL))
    assert selection.next_round() == 3
    selection.add(round_of(DIFFERENT, [0.5, 0.0], [0.2, 0.1], first_group=3))
    assert selection.next_round() == 0
    assert selection.trained().text.group_ids.tolist() == [1, 1, 3, 3, 4, 4]
    assert selection.trained().rewards.tolist() == pytest.approx([0, 1, 0, 1, 0.5, 0])
    assert selection.metrics() == {
        "filtered_fraction": pytest.approx(2 / 6),
        "sampling/rounds": 2,
        "sampling/prompts": 6,
        "sampling/trained_groups": 3,
        "sampling/surplus_groups": 1,
    }
    assert selection.shortfall() is None


@pytest.mark.parametrize(
    ("groups", "outcome"),
    [
        ([DIFFERENT, EQUAL, EQUAL, EQUAL], "kept 2 of 4 groups out of 8 drawn in 2 rounds, the most that algorithm."
         "max_sampling_rounds=2 allows: training on 2 groups"),
        ([EQUAL] * 4, "kept 0 of 4 groups out of 8 drawn in 2 rounds, the most that algorithm.max_sampling_rounds=2 "
         "allows: no optimizer step"),
    ],
)  # fmt: skip
def test_the_bound_on_rounds_is_kept_and_told(groups, outcome):
    selection = selection_of(max_sampling_rounds=2)
    for number in range(2):
        assert selection.next_round() > 0
        selection.add(round_of(*groups, first_group=4 * number))
    assert selection.next_round() == 0
    assert selection.shortfall() == f"algorithm.dynamic_filter {outcome}"
    assert len(selection.trained()) == 2 * selection.num_kept


def test_a_dynamic_batch_is_what_one_round_leaves():
    selection = selection_of(dynamic_bs=True)
    selection.add(round_of(EQUAL, DIFFERENT, EQUAL, EQUAL))
    assert selection.next_round() == 0
    assert selection.trained().text.group_ids.tolist() == [1, 1]
    assert selection.shortfall() is None


def test_an_empty_dynamic_batch_is_told():
    selection = selection_of(dynamic_bs=True)
    selection.add(round_of(*[EQUAL] * 4))
    assert len(selection.trained()) == 0
    assert selection.shortfall() == (
        "algorithm.dynamic_filter kept 0 groups out of 4 drawn in 1 round: no optimizer step"
    )


@pytest.mark.parametrize(("missing", "kept", "drawn"), [(1, 63, 64), (32, 32, 64), (60, 4, 64), (64, 0, 64)])
def test_a_further_round_is_large_enough_but_not_by_much(missing, kept, drawn):
    prompts = prompts_for(missing, kept=kept, drawn=drawn)
    rate = (kept + 1) / (drawn + 2)
    expected, spread = prompts * rate, math.sqrt(prompts * rate * (1 - rate))
    assert missing <= expected - spread < missing + 1


RUN = (
    "algorithm.dynamic_filter=tests.trainer.filters.even_answer",
    "algorithm.max_sampling_rounds=2",
    "num_iterations=4",
    "checkpoint.every=1",
    "eval.every=0",
    "logging.samples_per_iteration=64",
)


@pytest.fixture(scope="module")
def filtered(train, tmp_path_factory):
    """A run that keeps the prompts with an even answer, half of them, and what it printed."""
    run_dir = tmp_path_factory.mktemp("filtered") / "run"
    finished = train(run_dir, *RUN)
    assert finished.returncode == 0, finished.stderr
    return run_dir, finished.stdout


def expected_rounds() -> list[tuple[int, int, int]]:
    """(rounds, prompts, kept) of each iteration, from the order of the prompts alone."""
    sampler, iterations = PromptSampler(10, seed=0, shuffle=True), []
    for _ in range(4):
        answers = sampler.next_batch(4)
        rounds, kept = 1, sum(answer % 2 == 0 for answer in answers)
        if kept < 4:
            answers += sampler.next_batch(min(4, prompts_for(4 - kept, kept=kept, drawn=4)))
            rounds, kept = 2, sum(answer % 2 == 0 for answer in answers)
        iterations.append((rounds, len(answers), kept))
    return iterations


def test_a_run_fills_its_batches_as_far_as_the_bound_allows(filtered):
    run_dir, output = filtered
    expected = expected_rounds()
    assert {kept < 4 for _, _, kept in expected} == {True, False}, "both full batches and shortfalls are wanted here"
    for line, (rounds, prompts, kept) in zip(read_metrics(run_dir)[1:], expected, strict=True):
        assert (line["sampling/rounds"], line["sampling/prompts"]) == (rounds, prompts)
        assert line["filtered_fraction"] == pytest.approx(1 - kept / prompts)
        assert line["sampling/trained_groups"] == min(kept, 4)
        assert line["sampling/surplus_groups"] == max(kept - 4, 0)
        assert line["optimizer_steps"] == 1
        told = f"iteration {line['iteration']}: algorithm.dynamic_filter kept {kept} of 4 groups out of {prompts} drawn"
        assert (told in output) == (kept < 4)


def is_drawn(sample: dict) -> bool:
    """Whether the line is a sample of the rollout, and not of an evaluation or one that is shown a second time."""
    return not (sample.get("eval") or sample.get("worst_mismatch"))


def test_rewards_are_reported_over_all_drawn_and_over_the_trained_samples(filtered):
    samples = [json.loads(line) for line in (filtered[0] / "samples.jsonl").read_text().splitlines()]
    for line in read_metrics(filtered[0])[1:]:
        drawn = [s for s in samples if s["iteration"] == line["iteration"] and is_drawn(s)]
        assert len(drawn) == 4 * line["sampling/prompts"]
        even = sorted(s["group_id"] for s in drawn if int(s["answer"]) % 2 == 0)[: 4 * 4]
        trained = [s["reward"] for s in drawn if s["group_id"] in even]
        assert line["reward/mean"] == pytest.approx(sum(s["reward"] for s in drawn) / len(drawn))
        assert line["final_reward/mean"] == pytest.approx(sum(trained) / len(trained))


def test_ids_are_unique_over_the_run_and_streams_over_an_iteration(filtered):
    samples = [json.loads(line) for line in (filtered[0] / "samples.jsonl").read_text().splitlines()]
    samples = [sample for sample in samples if is_drawn(sample)]
    assert sorted(sample["sample_id"] for sample in samples) == list(range(len(samples)))
    assert len({sample["group_id"] for sample in samples}) == len(samples) // 4
    assert len({sample["response"] for sample in samples}) > 0.9 * len(samples)


def test_kill_and_resume_draws_the_same_rounds(filtered, command, train, tmp_path):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(command(run_dir, *RUN), env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    wait_for_lines(run_dir, 2, process)
    process.kill()
    process.wait()
    resumed = train(run_dir, *RUN, "resume=auto")
    assert resumed.returncode == 0, resumed.stderr
    assert timeless(read_metrics(run_dir)) == timeless(read_metrics(filtered[0]))
    assert (run_dir / "samples.jsonl").read_text() == (filtered[0] / "samples.jsonl").read_text()


def test_an_empty_dynamic_batch_makes_no_step(train, tmp_path):
    """Ten prompts in order, four an iteration: the one prompt with unequal rewards comes in the first and the third."""
    finished = train(
        tmp_path / "run",
        "reward.scorer=tests.trainer.scorers.VariesOnZero",
        "algorithm.dynamic_filter=nonzero_variance",
        "algorithm.dynamic_bs=true",
        "data.shuffle=false",
        "num_iterations=3",
    )
    assert finished.returncode == 0, finished.stderr
    lines = read_metrics(tmp_path / "run")[1:]
    assert [line["sampling/trained_groups"] for line in lines] == [1, 0, 1]
    assert [line["sampling/prompts"] for line in lines] == [4, 4, 4]
    assert [line["optimizer_steps"] for line in lines] == [1, 0, 1]
    assert lines[1]["filtered_fraction"] == 1
    assert lines[1]["final_reward/mean"] is None
    assert lines[1]["reward/mean"] == 0.5
    assert not {"loss", "grad_norm"} & lines[1].keys()
    assert (
        "iteration 2: algorithm.dynamic_filter kept 0 groups out of 4 drawn in 1 round: no optimizer" in finished.stdout
    )


def test_a_filter_that_cannot_be_loaded_ends_the_run_before_it_begins(recipe_dir, tmp_path, capsys):
    run_dir, path = tmp_path / "run", "tests.trainer.filters.missing"
    options = [f"--config-dir={recipe_dir}", "--config-name=tiny", f"run_dir={run_dir}"]
    assert train_ar.main([*options, f"algorithm.dynamic_filter={path}"]) == 2
    assert f"error: algorithm.dynamic_filter={path}: there is no missing in" in capsys.readouterr().err
    assert not run_dir.exists()


def test_the_filter_of_these_runs():
    part = make_part([([1], [[2]])])
    assert even_answer(replace(part, records=({"answer": "4"},)))
    assert not even_answer(replace(part, records=({"answer": "7"},)))


def test_errors_of_all_rounds_are_counted(train, tmp_path):
    finished = train(
        tmp_path,
        *RUN,
        "reward.scorer=tests.trainer.scorers.SometimesRaises",
        "num_iterations=2",
        "eval.path=null",
        "resume=auto",
    )
    assert finished.returncode == 0, finished.stderr
    lines = read_metrics(tmp_path)
    assert any(line["sampling/rounds"] == 2 for line in lines)
    assert all(line["reward/errors"] == line["reward/ungraded"] > 0 for line in lines)
