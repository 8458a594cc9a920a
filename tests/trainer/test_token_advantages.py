"""GAE over a graded part: where the reward is paid, who bootstraps, how advantages of tokens are normalised."""

from dataclasses import replace

import pytest
import torch

from tests.train.conftest import make_part
from unirl.algorithms import GAEConfig, NormConfig
from unirl.config.schema import AlgorithmConfig
from unirl.errors import UserError
from unirl.trainer.advantages import estimate_advantages
from unirl.trainer.token_advantages import check_gae, normalize_tokens, token_advantages
from unirl.types import SampleStatus

PLAIN = NormConfig(mean_level=None, std_level=None)
NAN = float("nan")


def part_with_values(values, *, rewards=(1.0, 0.0), status=(SampleStatus.COMPLETED, SampleStatus.COMPLETED)):
    """One group: a prompt of two tokens with responses of three and of two tokens."""
    part = make_part([([1, 2], [[3, 4, 5], [6, 7]])], rewards=list(rewards))
    by_token = torch.zeros(part.text.tokens.numel())
    by_token[part.text.loss_mask] = torch.tensor(values)
    part.text.status[:] = torch.tensor(status)
    return replace(part, advantages=None, values=by_token)


def generated(part, by_token) -> list[float]:
    assert not by_token[~part.text.loss_mask].any()
    return by_token[part.text.loss_mask].tolist()


def test_hand_computed():
    """delta = r + 0.9 V' - V = [-0.05, 0.13, 0.3], [0.05, -0.5]; A = delta + 0.9 * 0.5 A'; return = A + V."""
    part = part_with_values([0.5, 0.5, 0.7, 0.4, 0.5])
    config = AlgorithmConfig(gae=GAEConfig(discount=0.9, gae_lambda=0.5), adv_norm=PLAIN)
    found = estimate_advantages(part, config)
    advantages = [-0.05 + 0.45 * 0.265, 0.13 + 0.45 * 0.3, 0.3, 0.05 - 0.45 * 0.5, -0.5]
    assert generated(part, found.advantages) == pytest.approx(advantages)
    returns = [a + v for a, v in zip(advantages, [0.5, 0.5, 0.7, 0.4, 0.5], strict=True)]
    assert generated(part, found.returns) == pytest.approx(returns)
    assert torch.equal(found.rewards, part.rewards)


@pytest.mark.parametrize("status", [SampleStatus.TRUNCATED, SampleStatus.ABORTED])
def test_a_sample_that_was_cut_off_bootstraps_from_its_last_value(status):
    part = part_with_values([0.5, 0.5, 0.7, 0.4, 0.5], status=(SampleStatus.COMPLETED, status))
    advantages, _ = token_advantages(part, part.rewards, torch.zeros_like(part.values), GAEConfig(discount=0.9))
    last = 0.9 * 0.5 - 0.5
    assert generated(part, advantages)[3:] == pytest.approx([0.05 + 0.9 * last, last], abs=1e-6)
    assert generated(part, advantages)[2] == pytest.approx(0.3)
    ending = GAEConfig(discount=0.9, bootstrap_truncated=False)
    advantages, _ = token_advantages(part, part.rewards, torch.zeros_like(part.values), ending)
    assert generated(part, advantages)[4] == pytest.approx(-0.5)


def test_rewards_of_turns_are_paid_with_their_last_tokens():
    """Turns of two and of one token: A of the second is 1 - 0.7; of the first 0.2 + 0.9 * 0.7 - 0.5, lambda 0."""
    part = part_with_values([0.5, 0.5, 0.7, 0.4, 0.5], rewards=(1.2, NAN))
    part.text.turn_ids[4] = 1
    by_turn = torch.zeros_like(part.values)
    by_turn[torch.tensor([3, 4])] = torch.tensor([0.2, 1.0])
    part = replace(part, turn_rewards=by_turn)
    config = AlgorithmConfig(gae=GAEConfig(discount=0.9, gae_lambda=0.0, gae_timestep_unit="turn"), adv_norm=PLAIN)
    found = generated(part, estimate_advantages(part, config).advantages)
    assert found[:3] == pytest.approx([0.33, 0.33, 0.3])
    assert found[3:] == [0, 0]  # no verdict


def test_kl_rewards_are_paid_where_they_arise():
    part = part_with_values([0.0] * 5)
    kl_rewards = torch.zeros_like(part.values)
    kl_rewards[3] = -0.25  # the second generated token
    advantages, returns = token_advantages(part, part.rewards, kl_rewards, GAEConfig())
    assert generated(part, advantages) == pytest.approx([0.75, 0.75, 1.0, 0.0, 0.0])
    assert torch.equal(advantages, returns)


def test_without_a_critic_and_decay_every_token_has_the_reward_of_its_sample():
    """Values are 0 then, and GAE with discount and lambda 1 gives what there is without GAE."""
    part = replace(part_with_values([0.0] * 5, rewards=(1.0, 0.3)), values=None)
    norm = NormConfig(mean_level="group", std_level=None)
    by_sample = estimate_advantages(part, AlgorithmConfig(adv_norm=PLAIN, reward_norm=norm))
    by_token = estimate_advantages(part, AlgorithmConfig(adv_norm=PLAIN, reward_norm=norm, gae=GAEConfig()))
    torch.testing.assert_close(by_token.advantages, by_sample.advantages)


def test_advantages_are_normalised_over_the_tokens_of_batch_or_group():
    part = make_part([([1], [[2, 3], [4]]), ([1, 2], [[3, 4]])], rewards=[0.0, 0.0, 0.0])
    advantages = torch.zeros(part.text.tokens.numel())
    advantages[part.text.loss_mask] = torch.tensor([1.0, 2.0, 6.0, 10.0, 20.0])
    batch = normalize_tokens(part, advantages, NormConfig(mean_level="batch", std_level=None))
    assert generated(part, batch) == pytest.approx([-6.8, -5.8, -1.8, 2.2, 12.2])
    group = normalize_tokens(part, advantages, NormConfig(mean_level="group", std_level="group", eps=1e-9))
    std, other_std = 7**0.5, 50**0.5
    assert generated(part, group) == pytest.approx([-2 / std, -1 / std, 3 / std, -5 / other_std, 5 / other_std])


def test_a_sample_without_a_verdict_is_as_if_absent():
    part = part_with_values([0.5, 0.5, 0.7, 0.4, 0.5], rewards=(NAN, 1.0))
    config = AlgorithmConfig(gae=GAEConfig(gae_lambda=0.9), adv_norm=NormConfig())
    found = estimate_advantages(part, config)
    alone = estimate_advantages(part.select(torch.tensor([1])), config)
    assert generated(part, found.advantages)[:3] == [0.0] * 3
    assert generated(part, found.advantages)[3:] == pytest.approx(
        generated(part.select(torch.tensor([1])), alone.advantages)
    )


@pytest.mark.parametrize(
    ("gae_lambda", "message"),
    [("no_such_module.f", "cannot be imported"), ("math.nextafter_", "cannot be imported")],
)
def test_a_lambda_that_cannot_be_had_is_refused_before_anything_runs(gae_lambda, message):
    with pytest.raises(UserError, match=f"algorithm.gae: gae_lambda: {gae_lambda} {message}"):
        check_gae(GAEConfig(gae_lambda=gae_lambda))


def test_an_empty_batch_has_no_advantages():
    part = part_with_values([0.0] * 5).select(torch.arange(0))
    found = estimate_advantages(part, AlgorithmConfig(gae=GAEConfig(), adv_norm=NormConfig()))
    assert found.advantages.shape == found.returns.shape == (0,)
