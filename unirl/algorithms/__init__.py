"""Losses, advantages and filters: pure functions on packed tensors, one file per algorithm.

Names are imported when they are first used, so that `unirl.algorithms.config` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.algorithms.advantage import gae
    from unirl.algorithms.aggregate import Denominators, count_denominators
    from unirl.algorithms.algorithm import REPLAY_LOGP, PolicyAlgorithm, PolicyLossFunction, make_algorithm
    from unirl.algorithms.config import (
        GAEConfig,
        NormConfig,
        OverlongConfig,
        PolicyLossConfig,
        RejectionConfig,
        StepAdvantageConfig,
        ValueLossConfig,
        gae_config_problems,
        loss_config_problems,
        required_inputs,
        value_loss_config_problems,
    )
    from unirl.algorithms.drpo import DRPO
    from unirl.algorithms.group_filter import rewards_differ
    from unirl.algorithms.loss import PolicyLossOutput, policy_loss, policy_loss_derivative
    from unirl.algorithms.metrics import Metric, merge_metrics
    from unirl.algorithms.norm import normalize
    from unirl.algorithms.ppo import PPO
    from unirl.algorithms.shaping import overlong_penalty, step_advantages
    from unirl.algorithms.value import ValueLossOutput, value_loss, value_loss_derivative, value_statistics

_HOMES = {
    "advantage": ("gae",),
    "aggregate": ("Denominators", "count_denominators"),
    "algorithm": ("REPLAY_LOGP", "PolicyAlgorithm", "PolicyLossFunction", "make_algorithm"),
    "config": (
        "GAEConfig",
        "NormConfig",
        "OverlongConfig",
        "PolicyLossConfig",
        "RejectionConfig",
        "StepAdvantageConfig",
        "ValueLossConfig",
        "gae_config_problems",
        "loss_config_problems",
        "required_inputs",
        "value_loss_config_problems",
    ),
    "drpo": ("DRPO",),
    "group_filter": ("rewards_differ",),
    "loss": ("PolicyLossOutput", "policy_loss", "policy_loss_derivative"),
    "metrics": ("Metric", "merge_metrics"),
    "norm": ("normalize",),
    "ppo": ("PPO",),
    "shaping": ("overlong_penalty", "step_advantages"),
    "value": ("ValueLossOutput", "value_loss", "value_loss_derivative", "value_statistics"),
}

__all__ = [
    "DRPO",
    "PPO",
    "REPLAY_LOGP",
    "Denominators",
    "GAEConfig",
    "Metric",
    "NormConfig",
    "OverlongConfig",
    "PolicyAlgorithm",
    "PolicyLossConfig",
    "PolicyLossFunction",
    "PolicyLossOutput",
    "RejectionConfig",
    "StepAdvantageConfig",
    "ValueLossConfig",
    "ValueLossOutput",
    "count_denominators",
    "gae",
    "gae_config_problems",
    "loss_config_problems",
    "make_algorithm",
    "merge_metrics",
    "normalize",
    "overlong_penalty",
    "policy_loss",
    "policy_loss_derivative",
    "required_inputs",
    "rewards_differ",
    "step_advantages",
    "value_loss",
    "value_loss_config_problems",
    "value_loss_derivative",
    "value_statistics",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
