"""The worker of a rank as a Ray actor."""

import ipaddress
import os
from collections.abc import Mapping

import psutil
import ray

from unirl.cluster.codec import send_tensors_as_numpy
from unirl.cluster.seat import Seated
from unirl.cluster.worker import MakeModels, Worker


class RayWorker(Seated, Worker):
    """Hosts the models of one rank in a process of its own."""

    def __init__(self, bundle: int, make_models: MakeModels, directory: str, environment: Mapping[str, str]):
        """directory, environment: those of the driver, so that relative paths and settings mean the same here."""
        os.chdir(directory)
        os.environ.update(environment)
        address = ray.util.get_node_ip_address()
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", _interface(address))
        send_tensors_as_numpy()
        Seated.__init__(self, bundle)
        Worker.__init__(self, make_models)


def _interface(address: str) -> str:
    """Name of the network interface with the address: of loopback for 127.0.0.0/8."""
    interfaces = psutil.net_if_addrs()
    if not ipaddress.ip_address(address).is_loopback:
        for name, found in interfaces.items():
            if any(entry.address == address for entry in found):
                return name
    return next(name for name, found in interfaces.items() if any(entry.address == "127.0.0.1" for entry in found))
