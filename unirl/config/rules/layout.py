"""Devices, nodes and parallel sizes."""

from pathlib import Path

from unirl.cluster.placement import PlacementError
from unirl.config.geometry import model_devices, multiples_around, neighbours, placement, trainer_devices
from unirl.config.rules.rule import rule
from unirl.config.rules.sources import read_model_config
from unirl.config.schema import TrainConfig

_SIZES = ("parallel.tp", "parallel.pp", "parallel.cp", "cluster.layout", "rollout.num_devices")


@rule("num_devices", *_SIZES)
def devices_hold_whole_models(config: TrainConfig) -> str | None:
    """The devices that train are a multiple of tp * pp * cp; the quotient is the data-parallel size."""
    parallel, unit, devices = config.parallel, model_devices(config), trainer_devices(config)
    if devices % unit == 0:
        return None
    fixes = [_valid_sizes(config, name) for name in ("tp", "pp", "cp")]
    fixes.append(_either("num_devices", [config.num_devices - devices + n for n in multiples_around(devices, unit)]))
    return (
        f"{devices} devices cannot be divided by tp*pp*cp = {parallel.tp}*{parallel.pp}*{parallel.cp} = "
        f"{unit}; use {', or '.join(fix for fix in fixes if fix)}"
    )


def _valid_sizes(config: TrainConfig, name: str) -> str:
    """The values next to parallel.`name` that mend the division, with the other sizes as they are."""
    size = getattr(config.parallel, name)
    others = model_devices(config) // size
    devices = trainer_devices(config)
    valid = [count for count in range(1, devices + 1) if devices % (count * others) == 0]
    return _either(f"parallel.{name}", neighbours(size, valid)) if size > 1 else ""


def _either(key: str, values: list[int]) -> str:
    return f"{key}={' or '.join(map(str, values))}" if values else ""


@rule("num_devices", "devices_per_node")
def nodes_are_full(config: TrainConfig) -> str | None:
    """More devices than one node has are a multiple of devices_per_node."""
    if config.num_devices <= config.devices_per_node or config.num_devices % config.devices_per_node == 0:
        return None
    valid = multiples_around(config.num_devices, config.devices_per_node)
    return (
        f"{config.num_devices} devices do not fill nodes of devices_per_node={config.devices_per_node}; use "
        f"{_either('num_devices', valid)}, or set devices_per_node"
    )


@rule(*_SIZES, "num_devices", "devices_per_node")
def tensor_groups_stay_in_a_node(config: TrainConfig) -> str | None:
    """On several nodes, devices_per_node is a multiple of tp * cp: these groups talk too much to cross nodes."""
    group = config.parallel.tp * config.parallel.cp
    is_on_one_node = config.num_devices <= config.devices_per_node
    if is_on_one_node or config.devices_per_node % group == 0 or trainer_devices(config) % model_devices(config):
        return None
    return (
        f"tp*cp = {config.parallel.tp}*{config.parallel.cp} = {group} does not divide the {config.devices_per_node} "
        "devices of a node (devices_per_node), so that a group would cross nodes; lower parallel.tp or parallel.cp"
    )


@rule("parallel.tp", "parallel.pp", "model.path")
def model_divides(config: TrainConfig) -> str | None:
    """tp divides the model's attention heads and key-value heads, and pp its layers (where model.path is a folder)."""
    path = Path(config.model.path) / "config.json"
    try:
        model, parallel = read_model_config(path), config.parallel
    except ValueError:
        return None  # a hub name, or what the rule of model.path reports
    parts = {"num_attention_heads": "tp", "num_key_value_heads": "tp", "num_hidden_layers": "pp"}
    uneven = [
        f"{name}={model[name]} by parallel.{size}={getattr(parallel, size)}"
        for name, size in parts.items()
        if isinstance(model.get(name), int) and model[name] % getattr(parallel, size)
    ]
    return f"the model of {path} cannot be divided: {', '.join(uneven)}" if uneven else None


@rule("parallel.ep", "num_devices", *_SIZES)
def experts_divide(config: TrainConfig) -> str | None:
    """The ranks of a pipeline stage, tp * cp * dp, are a multiple of ep."""
    dp, rest = divmod(trainer_devices(config), model_devices(config))
    ep, tp, cp = config.parallel.ep, config.parallel.tp, config.parallel.cp
    ranks = tp * cp * dp
    if rest or ranks % ep == 0:
        return None
    valid = neighbours(ep, [count for count in range(1, ranks + 1) if ranks % count == 0])
    return f"ep={ep} does not divide tp*cp*dp = {tp}*{cp}*{dp} = {ranks}; use {_either('parallel.ep', valid)}"


@rule("parallel.sequence_parallel", "parallel.tp")
def sequence_parallel_needs_tp(config: TrainConfig) -> str | None:
    """sequence_parallel needs tp > 1."""
    if not config.parallel.sequence_parallel or config.parallel.tp > 1:
        return None
    return "shards activations over tensor-parallel ranks, and parallel.tp=1 has none; set it to false, or tp > 1"


@rule(
    *("rollout.tp", "rollout.num_servers", "rollout.engine", "rollout.urls", "cluster.mode"),
    *("num_devices", "devices_per_node", *_SIZES),
)
def engines_fill_their_devices(config: TrainConfig) -> str | None:
    """On Ray SGLang servers of rollout.tp devices fill those that sample, and none of them is on two nodes; there are
    at most rollout.num_servers.
    """
    group = config.parallel.tp * config.parallel.cp
    crosses = config.num_devices > config.devices_per_node and config.devices_per_node % group
    if crosses or trainer_devices(config) % model_devices(config):
        return None
    try:
        placement(config)
    except PlacementError as error:
        return f"found {config.rollout.tp}: {error}"
    return None


@rule("parallel.vpp", "parallel.pp", "model.path")
def chunks_divide(config: TrainConfig) -> str | None:
    """parallel.vpp needs pp > 1, and pp * vpp divides the model's layers (where model.path is a folder)."""
    pp, vpp = config.parallel.pp, config.parallel.vpp
    if vpp is None:
        return None
    if pp == 1:
        return f"found {vpp}, but a pipeline of one stage has no chunks; set parallel.pp > 1, or parallel.vpp=null"
    try:
        layers = read_model_config(Path(config.model.path) / "config.json").get("num_hidden_layers")
    except ValueError:
        return None  # a hub name, or what the rule of model.path reports
    if not isinstance(layers, int) or layers % pp or layers % (pp * vpp) == 0:
        return None
    valid = neighbours(vpp, [count for count in range(2, layers // pp + 1) if layers // pp % count == 0])
    return f"pp*vpp = {pp}*{vpp} does not divide the {layers} layers of {config.model.path}; use " + (
        _either("parallel.vpp", valid) or "parallel.vpp=null"
    )


@rule("optimizer.cpu_offload", "parallel.use_distributed_optimizer")
def offload_is_distributed(config: TrainConfig) -> str | None:
    """optimizer.cpu_offload needs parallel.use_distributed_optimizer: else the master weights stay on the GPU."""
    if not config.optimizer.cpu_offload or config.parallel.use_distributed_optimizer:
        return None
    return "found true, which needs parallel.use_distributed_optimizer=true"
