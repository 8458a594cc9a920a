"""From rewards to advantages, as the `algorithm` section of the config says."""

from dataclasses import replace

import torch

from unirl import algorithms
from unirl.algorithms import StepAdvantageConfig
from unirl.algorithms.kl import kl_estimate
from unirl.config.schema import AlgorithmConfig, TrainConfig
from unirl.rollout import split_steps
from unirl.trainer.token_advantages import normalize_tokens, token_advantages
from unirl.types import Part


def estimate_advantages(part: Part, config: AlgorithmConfig) -> Part:
    """The graded `part` with advantages [T], and returns [T] where there is GAE; its rewards stay as they were graded.

    Without `algorithm.gae` a sample's KL rewards are added to its reward. `algorithm.reward_norm` normalises the sums,
    one per sample, then `algorithm.adv_norm` normalises the result again and spreads it over the sample's generated
    tokens. With it, `reward_norm` normalises the rewards alone, GAE makes an advantage for each generated token of
    these, the KL rewards where they arise and the critic's values, and `adv_norm` normalises the advantages of tokens.

    With `algorithm.success_filter` a sample whose own reward is not above 0 gets advantages of 0.
    """
    if config.gae is None:
        rewards = _normalized_rewards(final_rewards(part, config), part, config)
        advantages, returns = part.with_rewards(rewards).compute_advantages(config.adv_norm).advantages, part.returns
    else:
        rewards = _normalized_rewards(part.rewards, part, config)
        advantages, returns = token_advantages(part, rewards, kl_rewards(part, config), config.gae)
        advantages = normalize_tokens(part, advantages, config.adv_norm)
    if config.success_filter:
        advantages = advantages.where((part.rewards > 0)[part.text.token_sample_index], 0)
    return replace(part, advantages=advantages, returns=returns)


def _normalized_rewards(rewards: torch.Tensor, part: Part, config: AlgorithmConfig) -> torch.Tensor:
    """rewards [N] -> [N] by `reward_norm`."""
    if config.reward_norm is None:
        return rewards
    normalized = algorithms.normalize(rewards, part.text.group_ids, config.reward_norm)
    # A sample without a verdict comes out of `normalize` as 0, and must stay one without a verdict.
    return normalized.where(rewards.isfinite(), rewards)


def training_rows(part: Part, config: TrainConfig) -> Part:
    """The rows that the loss sees. `rollout.rows=step`: each turn of each sample, with the advantage of its episode
    shared out over the episode's steps (`algorithm.step_adv_const_length`); else the samples themselves.
    """
    if config.rollout.rows == "episode":
        return part
    sharing = StepAdvantageConfig(config.algorithm.step_adv_const_length)
    share = algorithms.step_advantages(sharing, torch.ones(len(part)), part.text.turn_counts.clamp(min=1))
    shared = replace(part, advantages=part.advantages * share[part.text.token_sample_index])
    return split_steps(shared, max_turns=config.rollout.max_turns)


def final_rewards(part: Part, config: AlgorithmConfig) -> torch.Tensor:
    """[N] float32: the reward of each sample with the KL rewards of its tokens."""
    return part.rewards + part.text.sum_by_sample(kl_rewards(part, config))


def kl_rewards(part: Part, config: AlgorithmConfig) -> torch.Tensor:
    """[T] float32: -kl_ctl times the estimated KL of rollout and reference policy at generated tokens, 0 elsewhere.

    A token whose log-prob is not finite has none. Raises ValueError where `kl_ctl` > 0 and the part has no `ref_logp`.
    """
    if config.kl_ctl == 0:
        return torch.zeros_like(part.text.log_probs)
    if part.ref_logp is None:
        raise ValueError(f"kl_ctl={config.kl_ctl} needs the log-probs of a reference policy, and the part has none")
    estimate = kl_estimate(config.kl_estimator, part.text.log_probs, part.ref_logp)
    return torch.where(part.text.loss_mask & estimate.isfinite(), -config.kl_ctl * estimate, 0)


def advantage_metrics(part: Part, config: AlgorithmConfig) -> dict[str, float | None]:
    """Means over graded samples and over their generated tokens; a mean over nothing is None."""
    rewards = final_rewards(part, config)
    graded = rewards.isfinite()
    advantages = part.advantages[part.text.loss_mask & graded[part.text.token_sample_index]]
    return {
        "final_reward/mean": rewards[graded].mean().item() if graded.any() else None,
        "advantages/mean": advantages.mean().item() if advantages.numel() else None,
    }
