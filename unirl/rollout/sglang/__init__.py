"""Rollouts on SGLang servers."""

from unirl.rollout.sglang.client import RequestRefusedError, ServerLostError
from unirl.rollout.sglang.control import ServerControl
from unirl.rollout.sglang.engine import EngineOptions, SGLangRolloutEngine
from unirl.rollout.sglang.fleet import FleetLimits
from unirl.rollout.sglang.guard import API_KEY_VARIABLE
from unirl.rollout.sglang.launch import ServerOptions, find_python
from unirl.rollout.sglang.server import per_server
from unirl.rollout.sglang.transfer import WeightSyncError, WeightTransfer

__all__ = [
    "API_KEY_VARIABLE",
    "EngineOptions",
    "FleetLimits",
    "RequestRefusedError",
    "SGLangRolloutEngine",
    "ServerControl",
    "ServerLostError",
    "ServerOptions",
    "WeightSyncError",
    "WeightTransfer",
    "find_python",
    "per_server",
]
