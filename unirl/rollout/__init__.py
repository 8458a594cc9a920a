"""Rollouts: the engine protocol, the engines behind it, and the way from prompts to a `Part`."""

from unirl.rollout.engine import ProgressCallback, RolloutEngine
from unirl.rollout.workflow import pack_completions, sample_seed, single_turn

__all__ = ["ProgressCallback", "RolloutEngine", "pack_completions", "sample_seed", "single_turn"]
