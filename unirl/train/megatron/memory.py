"""A rank's part of a trained model in memory: what a worker that is lost is restored from."""

from collections.abc import Iterator
from typing import Any

import torch

from unirl.train.megatron.model import PackedModel
from unirl.train.megatron.optimizer import PolicyOptimizer


def capture_state(chunks: list[PackedModel], optimizer: PolicyOptimizer) -> dict[str, Any]:
    """Weights, what AdamW updates beside them, its moments and counts: the live tensors, and not copies.

    Tensors stand in the order of the model and of its optimizer: the state is that of a rank of the same layout.
    """
    weights = [parameter.detach() for parameter in _weights(chunks)]
    held = {weight.untyped_storage().data_ptr() for weight in weights}
    updated, moments, counts = [], [], []
    for part in optimizer.torch_optimizers():
        counts.append([group.get("step") for group in part.param_groups])  # of fused AdamW
        for master in _masters(part):
            # Weights in fp32 are updated themselves, as a whole or in part.
            updated.append(None if master.untyped_storage().data_ptr() in held else master.detach())
            moments.append(dict(part.state.get(master, {})))
    return {"steps": optimizer.steps, "weights": weights, "updated": updated, "moments": moments, "counts": counts}


@torch.no_grad()
def restore_state(chunks: list[PackedModel], optimizer: PolicyOptimizer, state: dict[str, Any]) -> None:
    """Go on from what `capture_state` gave of a rank that holds the same part of the model, the same steps to the bit.

    Nothing of `state` is referred to afterwards.
    """
    optimizer.steps = state["steps"]
    for weight, value in zip(_weights(chunks), state["weights"], strict=True):
        weight.copy_(value)
    captured = zip(state["updated"], state["moments"], strict=True)
    for part, counts in zip(optimizer.torch_optimizers(), state["counts"], strict=True):
        for group, count in zip(part.param_groups, counts, strict=True):
            if count is not None:
                group["step"] = count
        part.state.clear()
        for master in _masters(part):
            value, moments = next(captured)
            if value is not None:
                master.copy_(value)
            if moments:
                part.state[master] = {name: _own(moment, master.device) for name, moment in moments.items()}


def _weights(chunks: list[PackedModel]) -> Iterator[torch.nn.Parameter]:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _masters(part: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (master for group in part.param_groups for master in group["params"])


def _own(moment: Any, device: torch.device) -> Any:
    """A copy on the device of the master weight; AdamW's step count, of no dimension, stays on the CPU."""
    if not isinstance(moment, torch.Tensor):
        return moment
    return moment.to(device if moment.dim() else "cpu", copy=True)
