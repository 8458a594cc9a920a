"""From a scorer's grades to rewards: bias, scale, clip, and what becomes of samples that were cut off, or nearly."""

import torch

from unirl.algorithms import OverlongConfig, overlong_penalty
from unirl.config.schema import RewardConfig
from unirl.types import SampleStatus


def shape_rewards(
    rewards: torch.Tensor,
    status: torch.Tensor,
    response_lengths: torch.Tensor,
    *,
    config: RewardConfig,
    max_new_tokens: int,
) -> torch.Tensor:
    """rewards [N] float, status [N] (`SampleStatus` values), response_lengths [N] in tokens -> rewards [N] float32.

    (grade + `config.bias`) * `config.scale`, clipped to [-`config.clip`, `config.clip`]. Then, by
    `config.truncated_reward`: `keep` leaves them as they are; `zero` gives 0 to truncated samples, which
    the status tells, not the length; `soft` subtracts the overlong penalty from every sample by its length
    (`unirl.algorithms.overlong_penalty`). A NaN (no verdict) stays NaN, except where `zero` decides the reward anyway.
    Raises ValueError for another mode, or where `overlong_tokens` exceeds `max_new_tokens`.
    """
    rewards = (rewards.float() + config.bias) * config.scale
    if config.clip is not None:
        rewards = rewards.clamp(-config.clip, config.clip)
    match config.truncated_reward:
        case "keep":
            return rewards
        case "zero":
            return rewards.masked_fill(status == SampleStatus.TRUNCATED, 0.0)
        case "soft":
            overlong = OverlongConfig(
                overlong_tokens=config.overlong_tokens,
                overlong_penalty_factor=config.overlong_penalty_factor,
                max_new_tokens=max_new_tokens,
            )
            return overlong_penalty(overlong, rewards, response_lengths)
    raise ValueError(f"reward.truncated_reward: found {config.truncated_reward!r}, expected keep, zero or soft")
