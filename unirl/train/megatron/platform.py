"""Where a hosted model computes, and the one place that adapts megatron-core to processes without CUDA.

Megatron-Core names the device "cuda" in a few places. Here the modules of megatron-core, and nothing else, get a
`torch` whose CUDA functions and device arguments mean the CPU; torch itself stays as it is for everybody else.

What is replaced are internals of the releases in MEGATRON_VERSIONS: 0.16.1, the last one for Python 3.11, and 0.19.2.
They name the device in the same places. What differs between them makes no difference here: 0.19 looks up the tensors'
type names in the same two optimizers, imports the matrix product of Transformer Engine that 0.16.1's router lacks (our
router does without), and logs that GPTModel will go.
"""

import contextlib
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator

import megatron.core
import torch
import torch.distributed as dist

MEGATRON_VERSIONS = ("0.16.1", "0.19.2")
"""The megatron-core releases whose internals this module replaces."""

_DEVICE_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")
_ADAPTED = (
    "dist_checkpointing",
    "dist_checkpointing.strategies.torch",
    "distributed",
    "models.gpt",
    "optimizer",
    "optimizer.distrib_optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel",
    "transformer.moe.moe_layer",
)
"""Modules of megatron.core that are imported, with all that they import, before they get their own torch."""
_installed = False


def choose_device() -> torch.device:
    """Where this process computes: CUDA where there is one, unless its default process group is of gloo alone."""
    if not torch.cuda.is_available() or (dist.is_initialized() and "nccl" not in dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def has_transformer_engine() -> bool:
    """Whether layers are Transformer Engine's: on CUDA where it is installed."""
    return choose_device().type == "cuda" and importlib.util.find_spec("transformer_engine") is not None


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Torch refuses kernels whose result is not the same each time; cuBLAS and NCCL are told to have one order.

    The environment variables reach libraries that were not used yet.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # memory is never read before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def install_cpu_platform() -> None:
    """Make megatron-core run on the CPU in this process. Idempotent.

    Call it in processes that host a CPU actor only. Raises RuntimeError for another megatron-core than the one whose
    internals are known here.
    """
    global _installed
    if _installed:
        return
    if megatron.core.__version__ not in MEGATRON_VERSIONS:
        raise RuntimeError(
            f"the CPU platform adapts megatron-core {' and '.join(MEGATRON_VERSIONS)}, found "
            f"{megatron.core.__version__}: install megatron-core=={MEGATRON_VERSIONS[0]}, or check "
            "unirl/train/megatron/platform.py against the new release"
        )
    for name in _ADAPTED:
        importlib.import_module(f"megatron.core.{name}")
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    _give_cpu_torch(_cpu_torch())
    # Random state "of the GPU", kept for tensor-parallel regions and recomputation.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # These compare Tensor.type() with the names of CUDA types.
    clip_grads.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    for mixed_precision in (optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        mixed_precision.__init__ = _with_cuda_type_names(mixed_precision.__init__)
    # It gives sizes to all_to_all as they are on a CPU, as tensors; on a GPU it moves them to numpy, of ints.
    token_dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    _installed = True


def _cpu_torch() -> types.ModuleType:
    """A stand-in for the module torch: the same names, but "cuda" means the CPU."""
    cuda = _overlay(
        torch.cuda,
        current_device=lambda: torch.device("cpu"),
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
        synchronize=lambda *args, **kwargs: None,
        # The token dispatcher of experts copies sizes to the CPU on a stream of its own.
        Stream=_NoStream,
        current_stream=_NoStream,
        stream=lambda stream: contextlib.nullcontext(),
    )
    return _overlay(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in _DEVICE_FACTORIES})


class _NoStream:
    """A stream where everything is done when the call returns, and an event of it."""

    def wait_stream(self, stream: "_NoStream") -> None: ...

    def record_event(self) -> "_NoStream":
        return self

    def synchronize(self) -> None: ...


def _as_numpy(tensor, as_numpy: bool = False, record_stream: bool = False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _overlay(module: types.ModuleType, **replacements) -> types.ModuleType:
    copy = types.ModuleType(module.__name__, module.__doc__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__.update(replacements, __getattr__=functools.partial(getattr, module))
    return copy


def _on_cpu(factory):
    @functools.wraps(factory)
    def on_cpu(*args, **kwargs):
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _give_cpu_torch(cpu_torch: types.ModuleType) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and getattr(module, "torch", None) is torch:
            module.torch = cpu_torch


def _with_cuda_type_names(function):
    """`function`, with Tensor.type() answering "torch.cuda.FloatTensor" for "torch.FloatTensor" while it runs."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _cuda_type_names():
    original = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = cuda_type
    try:
        yield
    finally:
        torch.Tensor.type = original
