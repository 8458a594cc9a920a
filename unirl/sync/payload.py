"""What SGLang's `/update_weights_from_tensor` takes: a pickle that refers to memory which both processes map.

The form is SGLang's, and the server reads it with an unpickler that knows a list of plain types and of torch's own
functions for shared memory. It is made here of nothing else, and without SGLang; nothing is ever unpickled here.
"""

import base64
import functools
import io
import os
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from unirl.errors import UserError
from unirl.sync.buckets import NUM_BUFFERS, Bucket

_SHARED_MEMORY = "/dev/shm"
_CUDA_DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


def allocate_shared(num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 in shared memory with a name; it goes with the last process that maps it.

    Raises UserError where there is not enough: to write there would end the process.
    """
    free = os.statvfs(_SHARED_MEMORY).f_bavail * os.statvfs(_SHARED_MEMORY).f_frsize
    if num_bytes * NUM_BUFFERS > free:
        raise UserError(
            f"{_SHARED_MEMORY} has {free / 1e6:.0f} MB free, a sync holds {NUM_BUFFERS} buckets of "
            f"{num_bytes / 1e6:.0f} MB there: lower sync.bucket_mb, enlarge it (docker: --shm-size), or set "
            "sync.mode=disk"
        )
    _start_keeper()
    storage = torch.UntypedStorage._new_using_filename_cpu(num_bytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


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


def tensor_payload(bucket: Bucket) -> str:
    """For one reader: each one has to get a payload of its own.

    bucket: in memory of `allocate_shared`, or on a CUDA device that the reader sees.
    """
    metadata = [
        SimpleNamespace(
            name=entry.name,
            shape=entry.shape,
            dtype=entry.dtype,
            start_idx=entry.start,
            end_idx=entry.end,
            numel=entry.end - entry.start,
        )
        for entry in bucket.entries
    ]
    written = io.BytesIO()
    _Pickler(written).dump({"flattened_tensor": bucket.flat, "metadata": metadata})
    return base64.b64encode(written.getvalue()).decode()


class _Pickler(ForkingPickler):
    """Writes where a tensor lies, not what is in it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
            value._shared_incref()  # the reader's
            return reductions.rebuild_storage_filename, (torch.UntypedStorage, *value._share_filename_cpu_())
        if isinstance(value, torch.Tensor) and value.is_cuda:
            rebuild, arguments = reductions.reduce_tensor(value)
            # Processes number devices differently.
            uuid = device_uuid(value.device)
            return rebuild, (*arguments[:_CUDA_DEVICE], uuid, *arguments[_CUDA_DEVICE + 1 :])
        return NotImplemented


def device_uuid(device: torch.device | int) -> str:
    """Of a CUDA device, the same in every process."""
    return str(torch.cuda.get_device_properties(device).uuid)
