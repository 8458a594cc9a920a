"""SGLang plugin of a CPU server: seeded sampling, and weight updates that reuse memory.

Seeds: SGLang takes a request's own seed where `--enable-deterministic-inference` is on, which it allows with CUDA
attention back-ends only. That option also swaps in Triton kernels whose rounding does not depend on the batch; they do
not exist for CPU, so here the option means seeds alone.

Memory: a page that is new to a process costs several times what copying its content does. A server maps the trainer's
shared memory anew for each bucket of an update by tensor, and receives a broadcast into new memory; on a GPU, where a
mapping lives in the driver and memory comes from torch's cache, neither matters.
"""

import ctypes
import mmap

import torch

_KEPT_BUFFERS = 4
"""Two that a trainer fills in turn, for each of two pipeline stages."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_REUSED = 256 * 2**20


def register() -> None:
    """Called by SGLang at the start of each of its processes (entry point `sglang.srt.plugins`)."""
    _allow_seeds()
    _keep_shared_buffers()
    _keep_freed_memory()


def _allow_seeds() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
        lambda original, runner: None,
        HookType.AROUND,
    )


def _keep_shared_buffers() -> None:
    """The last buffers of `/update_weights_from_tensor` stay mapped, for the time when they come again."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    buffers = SharedBuffers()

    def keep(original, worker, payloads):
        update = original(worker, payloads)
        if isinstance(update, dict):
            update["flattened_tensor"] = buffers.mapped(update["flattened_tensor"])
        return update

    HookRegistry.register("sglang.srt.managers.tp_worker.BaseTpWorker.deserialize_own_rank", keep, HookType.AROUND)


class SharedBuffers:
    """Mappings of shared memory of other processes, the last few that were asked for.

    They are not torch's: who lets go of one of those has to tell a process of the sender's, and is aborted where that
    is gone.
    """

    def __init__(self):
        self._kept: dict[str, torch.Tensor] = {}

    def mapped(self, flat: torch.Tensor) -> torch.Tensor:
        """The contents of `flat`, which lies in shared memory with a name, by way of a mapping that stays."""
        _, name, num_bytes = flat.untyped_storage()._share_filename_cpu_()
        name = name.decode()
        buffer = self._kept.pop(name, None)
        if buffer is None:
            buffer = _map(name, num_bytes)
        self._kept[name] = buffer  # the last one to go
        while len(self._kept) > _KEPT_BUFFERS:
            del self._kept[next(iter(self._kept))]
        start = flat.storage_offset() * flat.itemsize
        return buffer[start : start + flat.nbytes].view(flat.dtype).view(flat.shape)


def _map(name: str, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8. Torch keeps its count of readers in front of the contents."""
    with open(f"/dev/shm/{name.removeprefix('/')}", "r+b") as file:
        contents = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(contents, dtype=torch.uint8, count=num_bytes, offset=len(contents) - num_bytes)


def _keep_freed_memory() -> None:
    """The C library gives blocks of up to `_LARGEST_REUSED` bytes out again before it asks the kernel for new pages."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_REUSED)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGEST_REUSED)
