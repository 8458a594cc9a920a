"""Keeps a rank on the processors that are next to its GPU."""

import os
from pathlib import Path

import torch

_PCI = Path("/sys/bus/pci/devices")


def stay_near_device() -> str:
    """Bind this process, and the threads that it starts from now on, to the processors on its CUDA device's side of the
    machine; which these are, in words. Nothing is bound without a device, or where the machine does not tell.
    """
    if not torch.cuda.is_available():
        return "any"
    device = torch.cuda.get_device_properties(0)
    address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
    near = processors_near(address) & os.sched_getaffinity(0)
    if not near:  # others of the job, as of a Slurm step with few of them
        return "any"
    os.sched_setaffinity(0, near)
    return f"{len(near)} near {address}"


def processors_near(address: str, folder: Path = _PCI) -> set[int]:
    """Numbers of the processors on the side of a PCI device; none where Linux does not know.

    address: as 0000:3b:00.0. folder: /sys/bus/pci/devices.
    """
    try:
        listed = (folder / address / "local_cpulist").read_text().strip()
    except FileNotFoundError:
        return set()
    ranges = (part.partition("-") for part in listed.split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
