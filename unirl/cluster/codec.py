"""Tensors on their way between processes: as numpy arrays, which the object store hands out without a copy."""

import warnings

import numpy as np
import ray.util
import torch


def send_tensors_as_numpy() -> None:
    """From now on this process sends CPU tensors through Ray as numpy arrays; who receives them needs no such call.

    What is received may be shared with other processes of the node: it is read, never written in place.
    """
    ray.util.register_serializer(torch.Tensor, serializer=encode, deserializer=decode)


def encode(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """The array, and the name of the dtype, of a tensor on any device; bfloat16, which numpy lacks, as its bits."""
    tensor = tensor.detach().cpu().contiguous()
    array = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    return array.numpy(), str(tensor.dtype).removeprefix("torch.")


def decode(encoded: tuple[np.ndarray, str]) -> torch.Tensor:
    """The tensor that was encoded, on the memory of its array."""
    array, dtype = encoded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array).view(getattr(torch, dtype))
