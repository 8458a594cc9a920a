"""From rewards to advantages, as the `algorithm` section of the config says."""

from dataclasses import replace

from unirl import algorithms
from unirl.config.schema import AlgorithmConfig
from unirl.types import Part


def estimate_advantages(part: Part, config: AlgorithmConfig) -> Part:
    """The graded `part` with advantages [T]; its rewards stay as they were graded.

    `algorithm.reward_norm` normalises rewards, one per sample, then `algorithm.adv_norm` normalises the result again
    and spreads it over the sample's generated tokens.
    """
    if config.reward_norm is None:
        return part.compute_advantages(config.adv_norm)
    normalized = algorithms.normalize(part.rewards, part.text.group_ids, config.reward_norm)
    # A sample without a verdict comes out of `normalize` as 0, and must stay one without a verdict.
    normalized = normalized.where(part.rewards.isfinite(), part.rewards)
    return replace(part.with_rewards(normalized).compute_advantages(config.adv_norm), rewards=part.rewards)
