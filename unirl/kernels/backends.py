"""Which back-end computes a call: by device and dtype, unless the caller or the environment names one."""

import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from unirl.kernels import cpu, reference

BACKEND_VARIABLE = "UNIRL_KERNEL_BACKEND"
_BACKENDS: dict[str, ModuleType] = {"reference": reference, "cpu": cpu}
_warned = False


class BackendUnavailable(RuntimeError):
    """The back-end that was named cannot compute this call; the message says why."""


def available_backends() -> list[str]:
    """Names of the back-ends that can run here."""
    return [name for name in _BACKENDS if name != "cpu" or cpu.is_built()]


def choose_backend(name: str, logits: Tensor) -> ModuleType:
    """The back-end module for `logits`: `name`, else the environment's UNIRL_KERNEL_BACKEND, else the best that fits.

    Raises ValueError for an unknown name and BackendUnavailable where the named one cannot take these logits.
    """
    if name == "auto":
        name = os.environ.get(BACKEND_VARIABLE, "auto")
    if name == "auto":
        return _best(logits)
    if name not in _BACKENDS:
        raise ValueError(
            f"unknown kernel back-end {name!r}: expected auto or one of {', '.join(_BACKENDS)} "
            f"(argument `backend`, or the environment variable {BACKEND_VARIABLE})"
        )
    if name == "cpu" and not cpu.is_built():
        raise BackendUnavailable(f"back-end cpu: {cpu.HOW_TO_BUILD}")
    if not _BACKENDS[name].supports(logits):
        raise BackendUnavailable(
            f"back-end {name} cannot take {logits.dtype} logits on {logits.device.type}: use backend='reference'"
        )
    return _BACKENDS[name]


def _best(logits: Tensor) -> ModuleType:
    if logits.device.type != "cpu" or logits.dtype == torch.float64 or not cpu.supports(logits):
        return reference
    if cpu.is_built():
        return cpu
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"token kernels run in plain torch, slowly: {cpu.HOW_TO_BUILD}", stacklevel=4)
    return reference
