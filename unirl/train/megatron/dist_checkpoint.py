"""Sharded tensors on disk in the format `torch_dist` of Megatron's dist_checkpointing, written without a fork.

Megatron's own writer forks processes, which is not safe beside the threads of gloo, Ray and CUDA; here torch's writer
runs in a thread. The planning, the format and the reader are theirs.
"""

import json
import math
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, load
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from unirl.train.checkpoint import CheckpointWriteError
from unirl.train.manifest import FileSum, sum_of_file

_METADATA = ".metadata"
_BACKEND = CheckpointingConfig("torch_dist", 1)


class ShardedWrite:
    """A save of which this rank's part is being written by a thread of its own.

    Made, and finished, on all ranks alike. `state` maps any names to the blocks of tensors that this rank writes; its
    tensors must not change until the write is done. `extra` is a JSON file of rank 0, in the same folder.
    """

    def __init__(self, state: Mapping[str, ShardedTensor], extra: Mapping[str, Any], folder: Path):
        """Raises CheckpointWriteError, on every rank, where the folder cannot be written."""
        self.folder = folder
        self._extra = dict(extra)
        self._writer = _Writer(folder, thread_count=1, sync_files=True)
        self._metadata = _plan(dict(state), self._writer)
        executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future = executor.submit(self._write)
        executor.shutdown(wait=False)

    def done(self) -> bool:
        """Whether this rank's part is down, or has failed."""
        return self._written.done()

    def wait(self) -> None:
        """Until `done`."""
        self._written.exception()

    def finish(self) -> dict[str, FileSum]:
        """Wait for every rank, then write what makes the folder whole; the files of all ranks by name.

        Raises CheckpointWriteError, on every rank, where one of them could not write.
        """
        files = _together(self._written)
        results = _gather(self._writer.results)
        return files | _together(_attempt(self._complete, results if dist.get_rank() == 0 else None))

    def _write(self) -> dict[str, FileSum]:
        self._writer.write()
        return {path.name: sum_of_file(path) for path in self.folder.glob(f"__{dist.get_rank()}_*")}

    def _complete(self, results: list[list[WriteResult]] | None) -> dict[str, FileSum]:
        """What rank 0, which is given the results of all ranks, adds: the index of all tensors comes last."""
        if results is None:
            return {}
        return _complete_folder(self.folder, self._extra, self._writer, self._metadata, results)


def finish_write(write: ShardedWrite | None) -> dict[str, FileSum]:
    """See `ShardedWrite.finish`; where a rank knows of no write, it is that which the error tells."""
    if len(set(_gather(write is None))) > 1 or write is None:
        raise CheckpointWriteError("a process that was writing is gone")
    return write.finish()


def read_blocks(state: Mapping[str, ShardedTensor], folder: Path) -> None:
    """Fill the tensors of `state` from what any layout has saved; all ranks call it, with or without blocks.

    Raises OSError, on every rank, where one of them cannot read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)  # Megatron calls it
            dist_checkpointing.load(dict(state), str(folder), validate_access_integrity=False)
    except CheckpointException as error:  # not an Exception: it would pass by every handler
        raise OSError(f"{folder} cannot be read: {_reasons(error)}") from error


def read_index(folder: Path) -> Metadata:
    """Names, shapes and chunks of all tensors, without a process group.

    The index is a pickle: it is read here, and before anybody else reads it, by an unpickler that knows the classes of
    such an index and nothing else. Raises OSError or ValueError where it cannot be read, or holds anything else.
    """
    with open(folder / _METADATA, "rb") as file:
        try:
            return _IndexUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / _METADATA} is no index of tensors: {error}") from error


def read_whole(folder: Path, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) of each tensor whose name begins with `prefix`, one at a time, in one process without any
    group.

    Raises as `read_index` does.
    """
    reader = _Reader(folder)
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        if name.startswith(prefix):
            tensor = torch.empty(stored.size, dtype=stored.properties.dtype)
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                    load({name: tensor}, storage_reader=reader, no_dist=True)
            except CheckpointException as error:
                raise OSError(_reasons(error)) from error
            yield name, tensor


def write_whole(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], torch.Tensor],
    extra: Mapping[str, Any],
    folder: Path,
    *,
    max_file_bytes: int,
) -> dict[str, FileSum]:
    """Write float32 tensors into the existing `folder`, in one process without any group; its files by name.

    shapes: by name of the tensor.
    read: gives a tensor by its name, when its turn has come; those of one file are held. What it raises goes through,
        but for OSError and RuntimeError, which count as errors in writing.
    extra: as of `ShardedWrite`.
    max_file_bytes: size of a file from which on another one is begun, as if another rank had written it.

    Raises CheckpointWriteError where it cannot be written.
    """
    planner = _LazyPlanner(read)
    planner.set_up_planner(
        {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()},
        is_coordinator=True,
    )
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # 0: no CUDA stream, nothing lies on a GPU
    plans, metadata = planner.create_global_plan(_by_file(planner.create_local_plan(), max_file_bytes))
    try:
        results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
        files = {path.name: sum_of_file(path) for path in folder.glob("__*")}
        return files | _complete_folder(folder, extra, writer, metadata, results)
    except (OSError, RuntimeError) as error:
        raise CheckpointWriteError(_reason(error)) from error


_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")


def _memory_format(found: Any, name: str) -> _MEM_FORMAT_ENCODING:
    """The member of an enum: Python 3.11.0 to 3.11.3 pickle one as the attribute of its class."""
    if found is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"the attribute {name} of {found} has no place in it")
    return _MEM_FORMAT_ENCODING[name]


class _Reader(FileSystemReader):
    """Torch's reader over one index, read once and by `read_index`."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._index = read_index(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class _Writer(FileSystemWriter):
    """Torch's writer, cut where Megatron's planning ends and the writing begins."""

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        self._planned = plan, planner
        self.results: list[WriteResult] = []

    def write(self) -> None:
        self.results = self.write_data(*self._planned).wait()
        self._planned = None  # and the tensors with it


class _LazyPlanner(DefaultSavePlanner):
    """Plans with tensors that are not there yet."""

    def __init__(self, read: Callable[[str], torch.Tensor]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._read(write_item.index.fqn)


def _by_file(plan: SavePlan, max_file_bytes: int) -> list[SavePlan]:
    files: list[list[WriteItem]] = [[]]
    size = 0
    for item in plan.items:
        item_size = math.prod(item.tensor_data.size) * torch.float32.itemsize
        if files[-1] and size + item_size > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item_size
    return [replace(plan, items=items) for items in files]


def _complete_folder(
    folder: Path,
    extra: Mapping[str, Any],
    writer: FileSystemWriter,
    metadata: Metadata,
    results: list[list[WriteResult]],
) -> dict[str, FileSum]:
    """Write what stands beside the tensors; the index of them comes last."""
    (folder / "model.json").write_text(json.dumps(extra, indent=1) + "\n")
    torch.save({}, folder / COMMON_STATE_FNAME)
    save_config(_BACKEND, str(folder))
    writer.finish(metadata, results)
    names = ("model.json", COMMON_STATE_FNAME, "metadata.json", _METADATA)
    return {name: sum_of_file(folder / name) for name in names}


def _plan(state: dict[str, ShardedTensor], writer: _Writer) -> Metadata | None:
    """Agree on who writes what; the index of all tensors, without where they lie, on rank 0."""
    sharded, _ = save_preprocess(state, validate_access_integrity=True)
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(
        dedup_replicated_tensors=False, flatten_state_dict=False, can_run_decentralized_global_plan=False
    )
    try:
        planned = save_state_dict_async_plan(mcore_to_pyt_state_dict(by_key), writer, None, 0, planner=planner)
    except CheckpointException as error:
        raise CheckpointWriteError(_reasons(error)) from error
    return planned[0][1]


def _together(attempt: Future) -> dict[str, FileSum]:
    """The files of all ranks, or the failures of all ranks as one error."""
    error = attempt.exception()
    everyone = _gather((_reason(error), {}) if error is not None else (None, attempt.result()))
    failures = [f"rank {rank}: {reason}" for rank, (reason, _) in enumerate(everyone) if reason is not None]
    if failures:
        raise CheckpointWriteError("; ".join(failures)) from error
    return {name: found for _, files in everyone for name, found in files.items()}


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _attempt(function, *args) -> Future:
    """The function's result or exception, to be told to the other ranks first."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function, *args)


def _reasons(error: CheckpointException) -> str:
    return "; ".join(f"rank {rank}: {_reason(failure)}" for rank, (failure, _) in error.failures.items())


def _reason(error: BaseException) -> str:
    cause = error
    while cause is not None and not isinstance(cause, OSError):  # torch's own errors hide that of the file below them
        cause = cause.__cause__ or cause.__context__
    error = cause or error
    if isinstance(error, OSError) and error.strerror:
        return os.strerror(error.errno) if error.filename is None else f"{error.strerror}: {error.filename}"
    return f"{type(error).__name__}: {error}"
