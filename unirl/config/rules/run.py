"""The folder of a run, and what this version runs. A config beyond it is planned by --dry-run and refused by a run."""

import re

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("run_dir")
def run_has_a_folder(config: TrainConfig) -> str | None:
    """run_dir is not empty, as it is where a shell variable is unset."""
    return None if config.run_dir.strip() else "is empty: give the folder of the run, e.g. run_dir=runs/first"


@rule("cluster.mode", "num_devices")
def one_process_has_one_device(config: TrainConfig) -> str | None:
    """cluster.mode=inprocess needs num_devices=1."""
    if config.cluster.mode != "inprocess" or config.num_devices == 1:
        return None
    return f"found inprocess with num_devices={config.num_devices}: set cluster.mode=ray, or num_devices=1"


@rule("cluster.address")
def address_is_given_in_full(config: TrainConfig) -> str | None:
    """cluster.address is host:port, never auto: that would join whatever cluster runs here."""
    address = config.cluster.address
    if address is None or re.fullmatch(r"\[?[\w.:-]+\]?:\d+", address):
        return None
    return f"found {address!r}, expected host:port as `ray start --head` prints it, or null"


@rule("rollout.urls", "rollout.engine", "num_devices", "devices_per_node", run_only=True)
def servers_are_launched_on_one_node(config: TrainConfig) -> str | None:
    """This version launches SGLang servers on one machine; for runs on several, rollout.urls names running ones."""
    if config.rollout.engine != "sglang" or config.rollout.urls or config.num_devices <= config.devices_per_node:
        return None
    return (
        f"is empty: this version launches SGLang servers on one machine, and num_devices={config.num_devices} are on "
        "several; name servers that run already; --dry-run plans more"
    )


@rule("rollout.num_devices", "cluster.layout", "num_devices")
def split_layout_has_both_sides(config: TrainConfig) -> str | None:
    """rollout.num_devices is given with cluster.layout=split, below num_devices, and only then."""
    sampling, layout = config.rollout.num_devices, config.cluster.layout
    if layout == "colocate":
        return None if sampling is None else f"found {sampling}, which cluster.layout=colocate does not read; use null"
    if sampling is not None and sampling < config.num_devices:
        return None
    return f"found {sampling}, expected 1 to {config.num_devices - 1} of num_devices={config.num_devices}"


@rule("cluster.layout", run_only=True)
def colocated(config: TrainConfig) -> str | None:
    """This version runs cluster.layout=colocate."""
    layout = config.cluster.layout
    return None if layout == "colocate" else f"found {layout}; this version runs colocate; --dry-run plans more"
