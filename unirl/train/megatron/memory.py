"""A trained model's state in memory: what a lost rank is restored from. `state` has the same on disk."""

from typing import Any

import torch

from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.optimizer import PolicyOptimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


def capture_state(model: PackedModel, optimizer: PolicyOptimizer) -> dict[str, Any]:
    """Weights, masters and moments of this rank by name, the tensors themselves and not copies; the step count."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    masters = optimizer.masters(dict(model.named_parameters()))
    moments = {
        name: {moment: optimizer.moments(master)[moment] for moment in _MOMENTS}
        for name, master in masters.items()
        if optimizer.steps
    }
    return {
        "steps": optimizer.steps,
        "weights": parameters,
        "masters": {name: master.detach() for name, master in masters.items()},
        "moments": moments,
    }


@torch.no_grad()
def restore_state(model: PackedModel, optimizer: PolicyOptimizer, state: dict[str, Any]) -> None:
    """Go on from what `capture_state` gave of the same rank, or of one that holds the same part of the model."""
    parameters = dict(model.named_parameters())
    optimizer.steps = state["steps"]
    optimizer.forget_moments()
    for name, master in optimizer.masters(parameters).items():
        parameters[name].copy_(state["weights"][name])
        master.copy_(state["masters"][name])
        if state["steps"]:
            moments = (state["moments"][name][moment].to(master.device, copy=True) for moment in _MOMENTS)
            optimizer.set_moments(master, *moments)
