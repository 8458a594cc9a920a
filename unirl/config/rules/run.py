"""The folder of a run, its processes and devices."""

import re

from unirl.config.geometry import runs_on_ray
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


@rule("rollout.num_devices", "cluster.layout", "num_devices")
def split_layout_has_both_sides(config: TrainConfig) -> str | None:
    """rollout.num_devices is given with cluster.layout=split, below num_devices, and only then."""
    sampling, layout = config.rollout.num_devices, config.cluster.layout
    if layout == "colocate":
        return None if sampling is None else f"found {sampling}, which cluster.layout=colocate does not read; use null"
    if sampling is not None and sampling < config.num_devices:
        return None
    return f"found {sampling}, expected 1 to {config.num_devices - 1} of num_devices={config.num_devices}"


@rule("cluster.layout", "rollout.engine", "rollout.urls", "cluster.mode", "num_devices")
def split_layout_has_servers(config: TrainConfig) -> str | None:
    """cluster.layout=split is for SGLang servers that a run on Ray launches: not the native engine, no rollout.urls."""
    rollout = config.rollout
    if config.cluster.layout == "colocate" or (rollout.engine == "sglang" and not rollout.urls and runs_on_ray(config)):
        return None
    if rollout.engine != "sglang":
        return f"found split with rollout.engine={rollout.engine}, which has no devices of its own; use sglang"
    if rollout.urls:
        return "found split with rollout.urls, whose servers have devices of their own; use colocate"
    return f"found split with cluster.mode={config.cluster.mode}, which launches servers on this machine; use ray"
