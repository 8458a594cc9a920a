"""Where a Ray actor of a run sits, and what can be asked of it while it works."""

import sys
import threading
import traceback
from dataclasses import dataclass

import psutil
import ray

from unirl.cluster.network import use_interface_of_node

WATCH = "watch"
"""The concurrency group whose methods answer while a call runs."""


@dataclass(frozen=True)
class Seat:
    """Where a worker runs. interface: of the network, for collectives. processors: those that it keeps to, in words."""

    node_id: str
    node_ip: str
    interface: str
    processors: str
    device: int
    bundle: int
    pid: int
    started: float

    def __str__(self) -> str:
        return (
            f"pid {self.pid} on {self.node_ip} ({self.interface}), device {self.device}, processors {self.processors}"
        )


class Seated:
    """Base of the actors of a `Crew`."""

    def __init__(self, bundle: int):
        """bundle: the node, of those of the crew."""
        self._bundle = bundle
        self._interface = use_interface_of_node()
        self._processors = "any"

    @ray.method(concurrency_group=WATCH)
    def seat(self) -> Seat:
        """Where this worker runs."""
        context, process = ray.get_runtime_context(), psutil.Process()
        return Seat(
            node_id=context.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            interface=self._interface,
            processors=self._processors,
            device=int(ray.get_gpu_ids()[0]),
            bundle=self._bundle,
            pid=process.pid,
            started=process.create_time(),
        )

    @ray.method(concurrency_group=WATCH)
    def stacks(self) -> str:
        """What every thread of the process is doing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
            for number, frame in sys._current_frames().items()
        )
