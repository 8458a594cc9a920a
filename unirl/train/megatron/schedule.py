"""The learning rate as a pure function of the number of the optimizer step."""

import math

from unirl.config.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step`, which counts from 1, out of `total_steps`.

    Warm-up: step / warmup_steps of the peak, so that no step is made at rate 0 and step `warmup_steps` is at the peak.
    Then constant, or from the peak at step warmup_steps + 1 down to `min_lr`, where it arrives after `total_steps`
    steps, by a straight line or half a cosine. Later steps stay there.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    decay_steps = max(total_steps - config.warmup_steps, 1)
    progress = min((step - 1 - config.warmup_steps) / decay_steps, 1.0)
    if config.schedule == "linear":
        left = 1 - progress
    elif config.schedule == "cosine":
        left = (1 + math.cos(math.pi * progress)) / 2
    else:
        raise ValueError(f"optimizer.schedule is {config.schedule!r}, expected constant, linear or cosine")
    return config.min_lr + (config.lr - config.min_lr) * left
