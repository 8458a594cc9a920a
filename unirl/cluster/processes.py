"""Ends processes of a run wherever they are."""

import os
import signal

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


def kill_process(node_id: str, pid: int, started: float) -> None:
    """Kill the process of that number and start time (seconds since the epoch) on a node, should both still be there.

    On another node it ends a moment later.
    """
    if node_id == ray.get_runtime_context().get_node_id():
        _kill(pid, started)
    elif any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
        ray.remote(num_cpus=0)(_kill).options(scheduling_strategy=strategy).remote(pid, started)


def _kill(pid: int, started: float) -> None:
    """The number may belong to another process by now."""
    try:
        if abs(psutil.Process(pid).create_time() - started) < 1:
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        pass
