"""One row per step, by hand."""

from dataclasses import replace

import pytest
import torch

from unirl.rollout import Row, pack_rows, split_steps
from unirl.types import Completion, SampleStatus


def completion(tokens):
    return Completion(tuple(tokens), tuple(-0.5 * t for t in tokens), SampleStatus.COMPLETED, (3,) * len(tokens))


def two_episodes():
    rows = [
        Row([(10, 11), (12,)], [completion([1, 2]), completion([3])], 7, SampleStatus.COMPLETED, {"answer": "a"}),
        Row([(20,)], [completion([4, 5])], 7, SampleStatus.TRUNCATED, {"answer": "b"}),
    ]
    part = pack_rows(rows, first_sample_id=7).with_rewards(torch.tensor([1.0, 0.5]))
    advantages = torch.tensor([0, 0, 1.0, 2, 0, 3, 0, 4, 5])
    return replace(part, advantages=advantages, turn_rewards=advantages / 10)


def test_episodes_by_hand():
    text = two_episodes().text
    assert text.tokens.tolist() == [10, 11, 1, 2, 12, 3, 20, 4, 5]
    assert text.log_probs.tolist() == [0, 0, -0.5, -1, 0, -1.5, 0, -2, -2.5]
    assert text.turn_ids.tolist() == [-1, -1, 0, 0, -1, 1, -1, 0, 0]
    assert text.weight_versions.tolist() == [-1, -1, 3, 3, -1, 3, -1, 3, 3]
    assert text.lengths.tolist() == [6, 3]
    assert text.prompt_lengths.tolist() == [2, 1]
    assert text.turn_counts.tolist() == [2, 1]
    assert text.turn_ends.tolist() == [3, 5, 8]


def test_steps_by_hand():
    part = split_steps(two_episodes(), max_turns=5)
    text = part.text
    assert text.tokens.tolist() == [10, 11, 1, 2, 10, 11, 1, 2, 12, 3, 20, 4, 5]
    assert text.loss_mask.int().tolist() == [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1]
    assert text.turn_ids.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, -1, 0, -1, 0, 0]
    assert text.log_probs.tolist() == [0, 0, -0.5, -1, 0, 0, 0, 0, 0, -1.5, 0, -2, -2.5]
    assert text.weight_versions.tolist() == [-1, -1, 3, 3, -1, -1, -1, -1, -1, 3, -1, 3, 3]
    assert text.lengths.tolist() == [4, 6, 3]
    assert text.prompt_lengths.tolist() == [2, 5, 1]
    assert text.sample_ids.tolist() == [35, 36, 40]
    assert text.episode_ids.tolist() == [7, 7, 8]
    assert text.group_ids.tolist() == [7, 7, 7]
    assert text.status.tolist() == [SampleStatus.COMPLETED, SampleStatus.COMPLETED, SampleStatus.TRUNCATED]
    assert part.rewards.tolist() == [1, 1, 0.5]
    assert part.advantages.tolist() == [0, 0, 1, 2, 0, 0, 0, 0, 0, 3, 0, 4, 5]
    torch.testing.assert_close(part.turn_rewards, part.advantages / 10)
    assert [record["answer"] for record in part.records] == ["a", "a", "b"]


def test_more_turns_than_said_are_refused():
    with pytest.raises(ValueError, match="a sample of 2 turns, expected at most 1"):
        split_steps(two_episodes(), max_turns=1)


def test_a_log_prob_that_is_not_finite_stays_in_its_own_step():
    episodes = two_episodes()
    broken = replace(episodes.text, log_probs=episodes.text.log_probs.index_fill(0, torch.tensor([2]), torch.nan))
    steps = split_steps(replace(episodes, text=broken), max_turns=2)
    assert steps.text.log_probs.isnan().int().tolist() == [0, 0, 1] + [0] * 10
