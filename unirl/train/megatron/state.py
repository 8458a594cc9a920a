"""An actor's state on disk, by names and not by positions: weights, fp32 masters, AdamW's moments, counters."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from unirl.errors import UserError
from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.optimizer import PolicyOptimizer

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
COUNTERS = "counters.json"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save_state(model: PackedModel, optimizer: PolicyOptimizer, folder: Path) -> None:
    """Write the state into the existing `folder`."""
    parameters = dict(model.named_parameters())
    save_file({name: parameter.detach() for name, parameter in parameters.items()}, folder / WEIGHTS)
    tensors = {}
    for name, master in optimizer.masters(parameters).items():
        tensors[f"master.{name}"] = master.detach()
        if optimizer.steps:
            moments = optimizer.moments(master)
            tensors.update({f"{moment}.{name}": moments[moment] for moment in _MOMENTS})
    save_file(tensors, folder / OPTIMIZER)
    (folder / COUNTERS).write_text(json.dumps({"optimizer_steps": optimizer.steps}) + "\n")


def load_state(model: PackedModel, optimizer: PolicyOptimizer, folder: Path) -> None:
    """Read what `save_state` wrote. Raises UserError, and changes nothing, for weights of other names or shapes."""
    parameters = dict(model.named_parameters())
    with safe_open(folder / WEIGHTS, "pt") as weights, safe_open(folder / OPTIMIZER, "pt") as states:
        _check_shapes(folder, weights, parameters)
        optimizer.steps = json.loads((folder / COUNTERS).read_text())["optimizer_steps"]
        optimizer.forget_moments()
        with torch.no_grad():
            for name, master in optimizer.masters(parameters).items():
                parameters[name].copy_(weights.get_tensor(name))
                master.copy_(states.get_tensor(f"master.{name}"))
                if optimizer.steps:
                    optimizer.set_moments(master, *(states.get_tensor(f"{moment}.{name}") for moment in _MOMENTS))


def _check_shapes(folder: Path, weights, parameters: dict[str, torch.nn.Parameter]) -> None:
    found = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    if found != expected:
        name = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        there, here = found.get(name, "missing"), expected.get(name, "missing")
        raise UserError(
            f"{folder} holds another model than model.path: shape of {name} there {there}, here {here}; resume with "
            "the model of the checkpoint"
        )
