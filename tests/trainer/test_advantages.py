"""Rewards to advantages: both norms, the KL as a reward, the success filter."""

from dataclasses import replace

import pytest
import torch

from tests.train.conftest import make_part
from unirl.algorithms import NormConfig
from unirl.config.schema import AlgorithmConfig
from unirl.trainer.advantages import advantage_metrics, estimate_advantages, kl_rewards

BATCH, GROUP, NONE = (NormConfig(level, level) for level in ("batch", "group", None))
REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.5, 0.5]
GROUPS = [([1, 2], [[3, 4], [5], [6, 7, 8], [9]]), ([1], [[2], [3, 4], [5]]), ([7], [[8], [9]])]


def part_with(rewards=REWARDS, ref_logp=None):
    part = replace(make_part(GROUPS, rewards=rewards), advantages=None)
    return part if ref_logp is None else replace(part, ref_logp=ref_logp * part.text.loss_mask)


def by_sample(part, values):
    """The value that all generated tokens of a sample share."""
    found = []
    for value, mask in zip(
        values.split(part.text.lengths.tolist()), part.text.loss_mask.split(part.text.lengths.tolist()), strict=True
    ):
        assert not value[~mask].any()
        assert len(set(value[mask].tolist())) == 1
        found.append(value[mask][0].item())
    return torch.tensor(found)


def advantages(part, **keys):
    return by_sample(part, estimate_advantages(part, AlgorithmConfig(**keys)).advantages)


def test_group_norm_then_batch_norm():
    """Of each reward: minus the mean over the std of its group, then all over the std of those."""
    rewards, expected = torch.tensor(REWARDS), []
    for group in (rewards[:4], rewards[4:7], rewards[7:]):
        expected.append((group - group.mean()) / (group.std() + 1e-5))
    expected = torch.cat(expected)
    assert expected[7:].tolist() == [0, 0]
    torch.testing.assert_close(advantages(part_with(), adv_norm=GROUP), expected)
    found = advantages(part_with(), reward_norm=GROUP, adv_norm=BATCH)
    torch.testing.assert_close(found, expected / (expected.std() + 1e-5), rtol=1e-5, atol=1e-7)
    assert found.sum().abs() < 1e-6


def test_rewards_stay_as_they_were_graded():
    part = part_with()
    found = estimate_advantages(part, AlgorithmConfig(reward_norm=GROUP, adv_norm=BATCH))
    assert torch.equal(found.rewards, part.rewards)


def test_equal_rewards_in_every_group_are_exactly_no_advantage():
    part = part_with([0.1] * 4 + [0.7] * 3 + [0.3] * 2)
    assert not advantages(part, reward_norm=GROUP, adv_norm=BATCH).any()


def test_a_sample_without_a_verdict_enters_neither_norm():
    rewards = [*REWARDS]
    rewards[2] = float("nan")
    found = advantages(part_with(rewards), reward_norm=GROUP, adv_norm=BATCH)
    others = torch.tensor([i for i in range(9) if i != 2])
    assert found[2] == 0
    expected = advantages(part_with().select(others), reward_norm=GROUP, adv_norm=BATCH)
    torch.testing.assert_close(found[others], expected)


@pytest.mark.parametrize(
    ("estimator", "estimate"),
    [("k1", lambda x: x), ("k2", lambda x: x**2 / 2), ("k3", lambda x: torch.exp(-x) - 1 + x)],
)
def test_kl_as_a_reward_is_added_before_any_norm(estimator, estimate):
    generator = torch.Generator().manual_seed(0)
    part = part_with()
    part = part_with(ref_logp=-torch.rand(part.text.tokens.numel(), generator=generator))
    kl = estimate(part.text.log_probs - part.ref_logp)
    config = AlgorithmConfig(kl_ctl=0.3, kl_estimator=estimator, adv_norm=NONE)
    torch.testing.assert_close(kl_rewards(part, config), -0.3 * kl)
    total = part.rewards - 0.3 * part.text.sum_by_sample(kl)
    estimated = estimate_advantages(part, config)
    torch.testing.assert_close(by_sample(part, estimated.advantages), total)
    assert torch.equal(estimated.rewards, part.rewards)
    assert advantage_metrics(estimated, config)["final_reward/mean"] == pytest.approx(total.mean().item())
    centred = advantages(part, kl_ctl=0.3, kl_estimator=estimator, adv_norm=NormConfig("group", None))
    torch.testing.assert_close(centred[:4], total[:4] - total[:4].mean())


def test_kl_as_a_reward_needs_a_reference():
    with pytest.raises(ValueError, match=r"kl_ctl=0.1 needs the log-probs of a reference policy"):
        estimate_advantages(part_with(), AlgorithmConfig(kl_ctl=0.1))


def test_a_lost_log_prob_has_no_kl():
    part = part_with(ref_logp=torch.full((26,), -1.0))
    part.text.log_probs[2] = float("nan")
    found = kl_rewards(part, AlgorithmConfig(kl_ctl=1.0))
    assert found.isfinite().all()
    assert found[2] == 0


def test_the_success_filter_leaves_the_successful_alone():
    rewards = [1.0, 0.0, -1.0, 0.5, float("nan"), 0.0, 0.0, 0.25, 0.0]
    found = advantages(part_with(rewards), success_filter=True, adv_norm=NONE)
    assert found.tolist() == [1, 0, 0, 0.5, 0, 0, 0, 0.25, 0]


def test_metrics_are_means_over_graded_samples_and_their_tokens():
    rewards = [1.0, 0.0, float("nan"), 0.0, 1.0, 1.0, 0.0, 0.5, 0.5]
    config = AlgorithmConfig(adv_norm=NONE)
    found = advantage_metrics(estimate_advantages(part_with(rewards), config), config)
    assert found == {"final_reward/mean": pytest.approx(4 / 8), "advantages/mean": pytest.approx(6 / 10)}
    nothing = advantage_metrics(estimate_advantages(part_with([float("nan")] * 9), config), config)
    assert nothing == {"final_reward/mean": None, "advantages/mean": None}
