"""Memory that other processes of this machine can map by its name: made, kept from sync to sync, and given back."""

import atexit
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from unirl.errors import UserError
from unirl.sync.buckets import NUM_BUFFERS, Buffers

FOLDER = Path("/dev/shm")
"""Where its names are."""


def allocate_shared(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 in shared memory, whose name goes with `release_shared` or with this process.

    Raises UserError where there is not enough: to write there would end the process.
    """
    free = os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize
    if num_bytes * NUM_BUFFERS > free:
        raise UserError(
            f"{FOLDER} has {free / 1e6:.0f} MB free, a sync holds {NUM_BUFFERS} buckets of "
            f"{num_bytes / 1e6:.0f} MB there: lower sync.bucket_mb, enlarge it (docker: --shm-size), or set "
            "sync.mode=disk"
        )
    _start_keeper()
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    # Torch counts readers in the memory itself, and the last one to leave takes the name away. This one never leaves:
    # a reader that was told of the memory and died would be counted for ever, so that the name is taken away here.
    storage._shared_incref()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def name_of(part: torch.Tensor) -> tuple[str, int]:
    """Where all of that is in FOLDER, and the number of its bytes, which are the last ones there."""
    _, name, num_bytes = part.untyped_storage()._share_filename_cpu_()
    return name.decode().removeprefix("/"), num_bytes


def release_shared(buffer: torch.Tensor) -> None:
    """Take its name away: it is gone with the last process that has it mapped, and nobody can map it any more."""
    name, _ = name_of(buffer)
    with suppress(FileNotFoundError):
        (FOLDER / name).unlink()


_idle: list[Buffers] = []


@contextmanager
def shared_buffers(bucket_bytes: int) -> Iterator[Buffers]:
    """Buffers in shared memory for one sync, those of an earlier one where there are. Where the sync fails nothing is
    kept: somebody who was told of a buffer may still read it.
    """
    buffers = _idle.pop() if _idle else Buffers(allocate_shared, release_shared)
    try:
        yield buffers
    except BaseException:
        buffers.clear()
        raise
    buffers.rest(bucket_bytes)
    _idle.append(buffers)


@atexit.register
def release_idle() -> None:
    """Give back what is kept in this process for the next sync."""
    while _idle:
        _idle.pop().clear()


@functools.cache
def _start_keeper() -> None:
    """Start the process with which torch keeps account of shared memory, apart from this one's error output.

    It lives as long as any process that has used the memory, so perhaps as long as a server: whoever reads the error
    output of this process to its end would wait for it.
    """
    own = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        torch.UntypedStorage._new_using_filename_cpu(1)
    finally:
        os.dup2(own, 2)
        os.close(own)
