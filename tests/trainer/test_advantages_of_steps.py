"""Advantages of rows per step, by hand."""

import pytest
import torch

from tests.rollout.test_steps import completion
from unirl.algorithms import NormConfig
from unirl.config.schema import AlgorithmConfig, RolloutConfig, TrainConfig
from unirl.rollout import Row, pack_rows
from unirl.trainer.advantages import estimate_advantages, training_rows
from unirl.types import SampleStatus


def graded():
    """One group: three episodes of 1, 3 and 2 turns, and one that was aborted."""
    rows = [
        Row([(10,)] * turns, [completion([1, 2])] * turns, 0, status, {})
        for turns, status in ((1, 0), (3, 0), (2, 0), (2, 2))
    ]
    rows = [row._replace(status=SampleStatus(row.status)) for row in rows]
    return pack_rows(rows, first_sample_id=0).with_rewards(torch.tensor([0.0, 1.0, 2.0, torch.nan]))


def rows_of(const_length, rows="step"):
    algorithm = AlgorithmConfig(
        temperature=1.0, adv_norm=NormConfig(mean_level="group", std_level=None), step_adv_const_length=const_length
    )
    config = TrainConfig(
        batch_size=1, num_iterations=1, run_dir="", algorithm=algorithm, rollout=RolloutConfig(rows=rows, max_turns=3)
    )
    return training_rows(estimate_advantages(graded(), algorithm), config)


def of_rows(part):
    """The advantage of each row."""
    return (part.text.sum_by_sample(part.advantages) / part.text.response_lengths).tolist()


def test_each_episode_counts_once_in_its_group():
    # Rewards 0, 1, 2 have mean 1, however many steps they took; the aborted one enters no mean.
    assert of_rows(rows_of(None, rows="episode")) == [-1, 0, 1, 0]


def test_steps_share_by_their_number():
    part = rows_of(None)
    assert of_rows(part) == [-1, 0, 0, 0, 0.5, 0.5, 0, 0]
    assert part.text.episode_ids.tolist() == [0, 1, 1, 1, 2, 2, 3, 3]
    assert part.text.sample_ids.tolist() == [0, 3, 4, 5, 6, 7, 9, 10]


def test_steps_share_by_a_constant():
    assert of_rows(rows_of(10)) == pytest.approx([-0.1, 0, 0, 0, 0.1, 0.1, 0, 0])
