"""Rollouts: the engine protocol, the engines behind it, and the way from prompts to a `Part`."""

from unirl.rollout.engine import ProgressCallback, RolloutEngine
from unirl.rollout.environment import Environment, StepResult, load_environment
from unirl.rollout.multi_turn import EpisodeLimits, MultiTurnWorkflow, turn_seed
from unirl.rollout.pack import Row, pack_rows
from unirl.rollout.steps import split_steps
from unirl.rollout.workflow import pack_completions, sample_seed, single_turn

__all__ = [
    "Environment",
    "EpisodeLimits",
    "MultiTurnWorkflow",
    "ProgressCallback",
    "RolloutEngine",
    "Row",
    "StepResult",
    "load_environment",
    "pack_completions",
    "pack_rows",
    "sample_seed",
    "single_turn",
    "split_steps",
    "turn_seed",
]
