"""Rollouts on SGLang servers."""

from unirl.rollout.sglang.checksums import ChecksumCollector
from unirl.rollout.sglang.client import RequestRefusedError, ServerLostError, SGLangClient
from unirl.rollout.sglang.control import STREAM_FORMAT, ServerControl
from unirl.rollout.sglang.engine import EngineOptions, SGLangRolloutEngine
from unirl.rollout.sglang.fleet import FleetLimits
from unirl.rollout.sglang.guard import API_KEY_VARIABLE
from unirl.rollout.sglang.launch import ServerOptions, find_python
from unirl.rollout.sglang.process import start_on_node
from unirl.rollout.sglang.server import Launcher, RunningServer, Server, per_server
from unirl.rollout.sglang.transfer import Update, WeightSyncError, WeightTransfer

__all__ = [
    "API_KEY_VARIABLE",
    "STREAM_FORMAT",
    "ChecksumCollector",
    "EngineOptions",
    "FleetLimits",
    "Launcher",
    "RequestRefusedError",
    "RunningServer",
    "SGLangClient",
    "SGLangRolloutEngine",
    "Server",
    "ServerControl",
    "ServerLostError",
    "ServerOptions",
    "Update",
    "WeightSyncError",
    "WeightTransfer",
    "find_python",
    "per_server",
    "start_on_node",
]
