"""What SGLang's `/update_weights_from_tensor` takes: a pickle that refers to memory which both processes map.

The form is SGLang's, and the server reads it with an unpickler that knows a list of plain types and of torch's own
functions for shared memory. It is made here of nothing else, and without SGLang; nothing is ever unpickled here.
"""

import base64
import io
import pickle
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from unirl.sync.buckets import Bucket

_CUDA_DEVICE = 6
"""Place of the device among the arguments of torch's `rebuild_cuda_tensor`."""


def plain_payload(value: dict[str, Any]) -> str:
    """Of texts and numbers."""
    return base64.b64encode(pickle.dumps(value)).decode()


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
