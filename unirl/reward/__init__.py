"""Rewards: `RewardService` grades responses in killable processes, `local/` holds the scorers.

Names are imported when they are first used: a scorer process imports this package too, and needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unirl.reward.service import RewardService, RewardStats
    from unirl.reward.shaping import shape_rewards

_HOMES = {"RewardService": "service", "RewardStats": "service", "shape_rewards": "shaping"}

__all__ = ["RewardService", "RewardStats", "shape_rewards"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
