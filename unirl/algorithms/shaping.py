"""Shaping of rewards and of episode advantages."""

from collections.abc import Mapping
from typing import Any

import torch

from unirl.algorithms.config import OverlongConfig, StepAdvantageConfig
from unirl.algorithms.validation import as_config, key_problems


def overlong_penalty(
    config: OverlongConfig | Mapping[str, Any], rewards: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """rewards [N] float, lengths [N] response tokens -> rewards [N] less the soft overlong penalty.

    The penalty rises linearly from 0 at max_new_tokens - overlong_tokens to `overlong_penalty_factor` at
    max_new_tokens, and stays there (DAPO, arXiv 2503.14476, eq. 13).
    Raises ValueError where `overlong_tokens` is not in [1, max_new_tokens], or shapes differ.
    """
    config = as_config(OverlongConfig, config)
    problems = key_problems(config)
    if not problems and config.overlong_tokens > config.max_new_tokens:
        problems = [
            f"overlong_tokens: found {config.overlong_tokens}, expected at most max_new_tokens={config.max_new_tokens}"
        ]
    if problems:
        raise ValueError(f"overlong_penalty: {'; '.join(problems)}")
    _check_shapes("overlong_penalty", rewards=rewards, lengths=lengths)
    excess = lengths - (config.max_new_tokens - config.overlong_tokens)
    share = excess.to(rewards.dtype) / config.overlong_tokens
    return rewards - config.overlong_penalty_factor * share.clamp(0, 1)


def step_advantages(
    config: StepAdvantageConfig | Mapping[str, Any], episode_values: torch.Tensor, steps: torch.Tensor
) -> torch.Tensor:
    """episode_values [E] float, steps [E] -> [E]: the advantage of each step of an episode.

    The episode's value divided by `step_adv_const_length`, or by the steps of the episode where that is null.
    Raises ValueError on an episode without steps, or shapes that differ.
    """
    config = as_config(StepAdvantageConfig, config)
    if problems := key_problems(config):
        raise ValueError(f"step_advantages: {'; '.join(problems)}")
    _check_shapes("step_advantages", episode_values=episode_values, steps=steps)
    if bool((steps < 1).any()):
        raise ValueError(f"step_advantages: steps: found {int(steps.min())}, expected at least 1 for every episode")
    if config.step_adv_const_length is not None:
        return episode_values / config.step_adv_const_length
    return episode_values / steps


def _check_shapes(function: str, **vectors: torch.Tensor) -> None:
    shapes = {name: tuple(vector.shape) for name, vector in vectors.items()}
    first = next(iter(vectors.values()))
    if first.dim() != 1 or len(set(shapes.values())) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{function}: found {found}, expected vectors of one length")
