"""The network interface that carries the address of a node."""

import ipaddress
import os

import psutil
import ray


def use_interface_of_node() -> str:
    """Have gloo and NCCL, in this process and its children, talk over the interface of this node's Ray address, unless
    the environment names another; the name of the one for gloo.
    """
    interface = _interface(ray.util.get_node_ip_address())
    for library in ("NCCL", "GLOO"):
        chosen = os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    return chosen


def _interface(address: str) -> str:
    """Name of the network interface with the address: of loopback for 127.0.0.0/8."""
    interfaces = psutil.net_if_addrs()
    if not ipaddress.ip_address(address).is_loopback:
        for name, found in interfaces.items():
            if any(entry.address == address for entry in found):
                return name
    return next(name for name, found in interfaces.items() if any(entry.address == "127.0.0.1" for entry in found))
