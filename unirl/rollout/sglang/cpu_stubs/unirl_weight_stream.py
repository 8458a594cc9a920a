"""The server's end of a stream of weights: one request, and then bucket after bucket while it lasts.

SGLang's own updates take a request for each bucket, through four processes, while nothing is copied. Here the process
that loads a bucket is told of it straight away, so that a bucket can be small enough to be in the processor's cache
when it is read, and the next one comes while this one is loaded.

The trainer's ends are `unirl/sync/stream.py` and `unirl/sync/distributed.py`.
"""

import functools
import json
import mmap
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "unirl_stream"
"""The `load_format` of such a request. A server that knows it lists it among its custom weight loaders."""

_KEPT_BUFFERS = 4
"""Two that a trainer fills in turn, for each of two pipeline stages. They stay mapped: pages that are new to a process
cost more than to copy what is in them.
"""


def register() -> None:
    """Take requests of this `load_format`, by tensor and by broadcast."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    HookRegistry.register(f"{updater}.update_weights_from_tensor", _by_tensor, HookType.AROUND)
    HookRegistry.register(f"{updater}.receive_weights_from_distributed", _by_broadcast, HookType.AROUND)


def _by_tensor(original: Callable, updater: Any, *, named_tensors: Any, load_format: str | None = None) -> Any:
    if load_format != NAME:
        return original(updater, named_tensors=named_tensors, load_format=load_format)
    # SGLang's own update says where a model cannot be updated. Its checks take longer than to load a bucket.
    nothing = {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}
    possible, message = original(updater, named_tensors=nothing, load_format="flattened_bucket")
    if not possible:
        return possible, message
    model = updater.get_model()
    try:
        with _walked_once(model):
            for flat, entries in from_memory(**named_tensors):
                model.load_weights([(entry.name, _part(flat, entry)) for entry in entries])
    except Exception as error:  # noqa: BLE001 (whatever it is, it ends the update and not the server)
        return False, f"the stream of weights broke off: {error!r}"
    return True, message


def _by_broadcast(original: Callable, updater: Any, *, group_name: str, load_format: str | None = None, **told) -> Any:
    if load_format != NAME:
        return original(updater, group_name=group_name, load_format=load_format, **told)
    return from_group(updater._model_update_group[group_name])


@contextmanager
def _walked_once(model: torch.nn.Module) -> Iterator[None]:
    """A model's `load_weights` looks all its parameters up anew, which takes a third as long as to copy a bucket."""
    look_up = model.named_parameters
    model.named_parameters = functools.cache(lambda *args, **options: list(look_up(*args, **options)))
    try:
        yield
    finally:
        del model.named_parameters


def from_memory(address: str, timeout_s: float) -> Iterator[tuple[torch.Tensor, list[SimpleNamespace]]]:
    """Buckets ([num_bytes] uint8, its tensors) in shared memory of a trainer that is told when each has been read.

    address: the trainer's socket, in the abstract namespace of Linux, where a line of JSON tells of each bucket.
    timeout_s: for the next line. Raises OSError where the trainer is gone, or silent, before it has told of the end.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{address}")
        for line in connection.makefile("rb"):
            told = json.loads(line)
            if not told:
                return
            yield _mapped(told["memory"], told["size"]), [_entry(*entry) for entry in told["entries"]]
            connection.sendall(b"\n")
    raise ConnectionError("the trainer left in the middle")


def from_group(group: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights that rank 0 broadcasts in buckets; the next bucket comes in while the weights of one are used."""
    arrived: list[tuple[str, torch.Tensor]] = []
    sizes = torch.empty(2, dtype=torch.int64)
    while True:
        dist.broadcast(sizes, 0, group)
        described, num_bytes = sizes.tolist()
        if not described:
            break
        description = torch.empty(described, dtype=torch.uint8)
        dist.broadcast(description, 0, group)
        flat = _memory.take(num_bytes)
        on_its_way = dist.broadcast(flat, 0, group, async_op=True)
        yield from arrived
        on_its_way.wait()
        entries = [_entry(*entry) for entry in json.loads(description.numpy().tobytes())]
        arrived = [(entry.name, _part(flat, entry)) for entry in entries]
        del flat
    yield from arrived


class Memory:
    """For buckets; what no tensor refers to any more is given out again. Pages that are new to a process cost more than
    to copy what is in them.
    """

    def __init__(self):
        self._kept: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8."""
        unused = [kept for kept in self._kept if sys.getrefcount(kept) == _REFERENCES_UNUSED]
        memory = next((kept for kept in unused if len(kept) >= num_bytes), None)
        if memory is None:
            self._kept = [kept for kept in self._kept if kept not in unused]
            memory = mmap.mmap(-1, max(num_bytes, 1))
            self._kept.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


_REFERENCES_UNUSED = 3
"""To what is looked at: from the list, from the loop, and from the question itself."""

_memory = Memory()


def _part(flat: torch.Tensor, entry: SimpleNamespace) -> torch.Tensor:
    return flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)


def _entry(name: str, dtype: str, shape: list[int], start: int, end: int) -> SimpleNamespace:
    """A tensor in a bucket, with the names that SGLang has for it."""
    return SimpleNamespace(
        name=name,
        shape=torch.Size(shape),
        dtype=getattr(torch, dtype),
        start_idx=start,
        end_idx=end,
        numel=end - start,
    )


@functools.lru_cache(_KEPT_BUFFERS)
def _mapped(name: str, size: int) -> torch.Tensor:
    """[size] uint8 at the end of the shared memory of that name: torch keeps its count of readers in front."""
    with open(f"/dev/shm/{name}", "r+b") as file:
        contents = mmap.mmap(file.fileno(), 0)
    return torch.frombuffer(contents, dtype=torch.uint8, count=size, offset=len(contents) - size)
