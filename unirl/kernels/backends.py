"""Which back-end computes a call: by device and dtype, unless the caller or the environment names one."""

import importlib
import importlib.util
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from unirl.kernels import cpu, cuda, reference

BACKEND_VARIABLE = "UNIRL_KERNEL_BACKEND"
_BACKENDS = {name: f"unirl.kernels.{name}" for name in ("reference", "cpu", "triton", "cuda")}
# Of each device, the best first.
_PREFERRED = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}
_NO_TRITON = "triton is not installed; pip install --no-deps triton==3.7.1 (it pairs with torch 2.13)"
_warned: set[str] = set()


class BackendUnavailable(RuntimeError):
    """The back-end that was named cannot compute this call; the message says why."""


def available_backends() -> list[str]:
    """Names of the back-ends that can run here."""
    return [name for name in _BACKENDS if _obstacle(name) is None]


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
    if obstacle := _obstacle(name):
        raise BackendUnavailable(f"back-end {name}: {obstacle}")
    backend = _module(name)
    if not backend.supports(logits):
        raise BackendUnavailable(
            f"back-end {name} cannot take {logits.dtype} logits on {logits.device.type}: use backend='reference'"
        )
    return backend


def _obstacle(name: str) -> str | None:
    """Why a back-end cannot run on this machine at all; None if it can."""
    if name == "cpu" and not cpu.is_built():
        return cpu.HOW_TO_BUILD
    if name == "cuda":
        return cuda.obstacle()
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return _NO_TRITON
        if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            return "it needs a CUDA device, or TRITON_INTERPRET=1 from the start for Triton's interpreter (slow)"
    return None


def _module(name: str) -> ModuleType:
    """Imported when it is first needed: triton takes its time."""
    return importlib.import_module(_BACKENDS[name])


def _best(logits: Tensor) -> ModuleType:
    names = _PREFERRED.get(logits.device.type, ())
    if not names or logits.dtype not in (torch.float32, torch.bfloat16):
        return reference
    obstacles = {name: _obstacle(name) for name in names}
    for name, obstacle in obstacles.items():
        if obstacle is None:
            return _module(name)
    if names[0] not in _warned:
        _warned.add(names[0])
        reasons = "; ".join(f"{name}: {obstacle}" for name, obstacle in obstacles.items())
        warnings.warn(f"token kernels run in plain torch, slowly: {reasons}", stacklevel=4)
    return reference
