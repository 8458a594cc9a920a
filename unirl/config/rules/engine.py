"""The rollout engine and the way of weights to it."""

import re

from unirl.config.rules.rule import rule
from unirl.config.schema import TrainConfig


@rule("sync.mode", "rollout.engine")
def weights_can_reach_the_engine(config: TrainConfig) -> str | None:
    """sync.mode is inprocess for the native engine, and another one for rollout.engine=sglang."""
    mode, engine = config.sync.mode, config.rollout.engine
    if (mode == "inprocess") == (engine == "native"):
        return None
    if engine == "native":
        return f"found {mode}, but rollout.engine=native lives in the trainer's process; use inprocess"
    return "found inprocess, but SGLang servers are processes of their own; use tensor, distributed or disk"


@rule("sync.mode", "rollout.urls", "num_devices", "devices_per_node")
def shared_memory_is_of_one_machine(config: TrainConfig) -> str | None:
    """sync.mode=tensor needs trainer and servers on one machine."""
    if config.sync.mode != "tensor":
        return None
    remote = [url for url in config.rollout.urls if not re.match(r"https?://(localhost|127\.|\[::1\])", url)]
    if remote:
        return f"found tensor, but {remote[0]} may be another machine, which shares no memory; use distributed"
    if config.num_devices > config.devices_per_node:
        return (
            f"found tensor, but num_devices={config.num_devices} are on several machines of devices_per_node="
            f"{config.devices_per_node}; use distributed"
        )
    return None


@rule("sync.timeout_s", "sync.mode", "parallel.timeout_s", "cluster.timeout_s")
def ranks_wait_for_servers(config: TrainConfig) -> str | None:
    """sync.mode=tensor and distributed need parallel.timeout_s and cluster.timeout_s longer than sync.timeout_s."""
    if config.sync.mode not in ("tensor", "distributed"):
        return None
    limits = {"parallel.timeout_s": config.parallel.timeout_s, "cluster.timeout_s": config.cluster.timeout_s}
    shorter = [f"{name}={limit:g}" for name, limit in limits.items() if limit <= config.sync.timeout_s]
    if not shorter:
        return None
    return f"found {config.sync.timeout_s:g}, which ranks wait for a server, but {', '.join(shorter)}: raise that"


@rule("rollout.release_memory", "rollout.engine", "cluster.layout")
def memory_is_released_where_it_is_shared(config: TrainConfig) -> str | None:
    """rollout.release_memory is for SGLang servers on the trainer's devices: cluster.layout=colocate."""
    if not config.rollout.release_memory or (config.rollout.engine, config.cluster.layout) == ("sglang", "colocate"):
        return None
    return (
        f"found true with rollout.engine={config.rollout.engine} and cluster.layout={config.cluster.layout}; it is for "
        "sglang and colocate"
    )


@rule("rollout.urls")
def urls_are_urls(config: TrainConfig) -> str | None:
    """rollout.urls are http://host:port or https://host:port."""
    wrong = [url for url in config.rollout.urls if not re.fullmatch(r"https?://[\w.\-\[\]:]+:\d+/?", url)]
    return f"found {', '.join(wrong)}, expected http://host:port" if wrong else None


@rule("rollout.urls", "rollout.python", "rollout.server_args")
def running_servers_take_no_options(config: TrainConfig) -> str | None:
    """rollout.python and rollout.server_args are for servers that are launched: rollout.urls is empty."""
    rollout = config.rollout
    if not rollout.urls or (rollout.python is None and not rollout.server_args):
        return None
    return "servers that run already are not launched with rollout.python or rollout.server_args; remove either"
