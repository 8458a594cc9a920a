"""The logits that a kernel is given: what is refused, and whose storage a gradient has taken already."""

import math

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Logits that hold their gradient, with the version that left them so: reading them again is an error.
_overwritten = WeakTensorKeyDictionary()


def mark_overwritten(logits: Tensor) -> None:
    """Says to autograd and to later calls that `logits` are gone."""
    torch.autograd.graph.increment_version(logits)
    _overwritten[logits] = logits._version


def check_logits(logits: Tensor, targets: Tensor) -> None:
    """ValueError for shapes, devices or strides that do not fit, TypeError for dtypes, RuntimeError for used logits."""
    if logits.dim() != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"expected logits [T, V_local] and targets [T], got {tuple(logits.shape)} and {tuple(targets.shape)}"
        )
    if not logits.is_floating_point() or targets.dtype != torch.int64:
        raise TypeError(f"expected floating logits and int64 targets, got {logits.dtype} and {targets.dtype}")
    if targets.device != logits.device:
        raise ValueError(f"logits are on {logits.device}, targets on {targets.device}: expected the same device")
    rows, width = logits.shape
    if (width > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < width):
        raise ValueError(
            f"logits of shape {(rows, width)} have strides {logits.stride()}: expected stride 1 along the vocabulary "
            "and rows that do not overlap; call .contiguous() first (that is a copy of the logits)"
        )
    if not logits.is_inference() and _overwritten.get(logits) == logits._version:
        raise RuntimeError(
            "these logits were overwritten with their gradient by an earlier call of a kernel: "
            "recompute them, or pass logits.clone() to the first call"
        )


def check_temperature(temperature: float) -> None:
    """ValueError where it is not a finite number > 0."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature={temperature}: expected a finite number > 0, the sampler's temperature")


def check_targets(targets: Tensor, vocab: int) -> None:
    """ValueError where a target is not a token of the real vocabulary.

    On a GPU the check does not wait for the device: there it ends in a device-side assert, as torch's own losses do.
    """
    if targets.numel() == 0:
        return
    if targets.is_cuda:
        inside = ((targets >= 0) & (targets < vocab)).all()
        torch._assert_async(inside, f"targets: expected [0, {vocab}); give masked positions any valid id")
        return
    low, high = (int(bound) for bound in targets.aminmax())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"targets lie in [{low}, {high}]: expected [0, {vocab}); give masked positions any valid id "
            "and mask their result"
        )
