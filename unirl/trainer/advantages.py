"""From rewards to advantages, as the `algorithm` section of the config says."""

from dataclasses import replace

import torch

from unirl import algorithms
from unirl.algorithms.kl import kl_estimate
from unirl.config.schema import AlgorithmConfig
from unirl.types import Part


def estimate_advantages(part: Part, config: AlgorithmConfig) -> Part:
    """The graded `part` with advantages [T]; its rewards stay as they were graded.

    A sample's KL rewards are added to its reward. `algorithm.reward_norm` normalises the sums, one per sample, then
    `algorithm.adv_norm` normalises the result again and spreads it over the sample's generated tokens. With
    `algorithm.success_filter` a sample whose own reward is not above 0 gets advantages of 0.
    """
    rewards = final_rewards(part, config)
    if config.reward_norm is not None:
        normalized = algorithms.normalize(rewards, part.text.group_ids, config.reward_norm)
        # A sample without a verdict comes out of `normalize` as 0, and must stay one without a verdict.
        rewards = normalized.where(rewards.isfinite(), rewards)
    estimated = part.with_rewards(rewards).compute_advantages(config.adv_norm).advantages
    if config.success_filter:
        estimated = estimated.where((part.rewards > 0)[part.text.token_sample_index], 0)
    return replace(part, advantages=estimated)


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
