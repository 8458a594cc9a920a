"""Weights laid into buckets, and the payload that tells a server of one."""

import base64
import io
import os
import pickle
from types import SimpleNamespace

import pytest
import torch

from unirl.errors import UserError
from unirl.sync import shared_memory
from unirl.sync.buckets import Buffers, Packer
from unirl.sync.payload import tensor_payload
from unirl.sync.shared_memory import allocate_shared, release_shared, shared_buffers


def new(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def unpacked(bucket) -> dict[str, torch.Tensor]:
    return {
        entry.name: bucket.flat[entry.start : entry.end].view(entry.dtype).view(entry.shape).clone()
        for entry in bucket.entries
    }


def test_every_weight_is_in_one_bucket_in_order():
    shapes = {"a": (3,), "b": (5, 2), "large": (40,), "c": (), "d": (0, 4), "e": (9,)}
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    weights["bf16"] = torch.randn(7).bfloat16()
    weights["last"] = torch.randn(2)
    packer = Packer(iter(weights.items()), 60, Buffers(new))
    buckets = []
    while packer.has_more:
        bucket = packer.pack()
        buckets.append((unpacked(bucket), len(bucket.flat), bucket.is_last))
    assert [list(found) for found, _, _ in buckets] == [
        ["a", "b"],
        ["large"],
        ["c", "d", "e"],
        ["bf16"],  # of another dtype, which could not be aligned
        ["last"],
    ]
    assert [size for _, size, _ in buckets] == [52, 160, 40, 14, 8]
    assert [last for _, _, last in buckets] == [False] * 4 + [True]
    for found, _, _ in buckets:
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, weights[name], atol=0, rtol=0)


def test_two_buffers_are_held_and_no_weight_longer_than_needed():
    allocated, living = [], 0

    def allocate(num_bytes: int) -> torch.Tensor:
        allocated.append(num_bytes)
        return new(num_bytes)

    def weights():
        nonlocal living
        for number in range(12):
            living += 1
            yield f"w{number}", torch.full((10,), float(number))
            living -= 1

    packer = Packer(weights(), 80, Buffers(allocate))
    while packer.has_more:
        bucket = packer.pack()
        assert living <= 1
        assert {float(tensor[0]) for tensor in unpacked(bucket).values()} == {
            float(entry.name[1:]) for entry in bucket.entries
        }
    assert allocated == [80, 80]


@pytest.mark.parametrize("held", [20, 400])
def test_buffers_of_a_sync_with_other_buckets_are_used_as_they_are(held):
    buffers = Buffers(new)
    earlier = Packer(iter([("x", torch.zeros(held // 4)), ("y", torch.zeros(held // 4))]), held, buffers)
    places = {earlier.pack().flat.data_ptr(), earlier.pack().flat.data_ptr()}
    packer = Packer(((f"w{i}", torch.full((5,), float(i))) for i in range(8)), 50, buffers)
    numbers = []
    while packer.has_more:
        bucket = packer.pack()
        assert bucket.flat.data_ptr() in places
        assert len(bucket.flat) == min(held, 40)
        numbers += [float(tensor[0]) for tensor in unpacked(bucket).values()]
    assert numbers == list(range(8))


def test_a_payload_refers_to_memory_by_plain_types_alone():
    weights = {"a": torch.randn(1000), "b": torch.randn(50, 20)}
    buffers = Buffers(allocate_shared, release_shared)
    bucket = Packer(iter(weights.items()), 8000, buffers).pack()
    payload = base64.b64decode(tensor_payload(bucket))
    assert len(payload) < 1500
    reader = Reader(io.BytesIO(payload))
    found = reader.load()
    assert torch.equal(found["flattened_tensor"], bucket.flat)
    assert vars(found["metadata"][1]) == {
        "name": "b",
        "shape": (50, 20),
        "dtype": torch.float32,
        "start_idx": 4000,
        "end_idx": 8000,
        "numel": 4000,
    }
    assert {module for module, _ in reader.named} == {
        "torch",
        "torch.multiprocessing.reductions",
        "torch.storage",
        "types",
    }
    buffers.clear()
    assert {name for module, name in reader.named if module == "types"} == {"SimpleNamespace"}


class Reader(pickle.Unpickler):
    """Notes what a pickle names."""

    named: set[tuple[str, str]]

    def __init__(self, file):
        super().__init__(file)
        self.named = set()

    def find_class(self, module: str, name: str):
        self.named.add((module, name))
        return super().find_class(module, name)


def test_too_little_shared_memory_is_explained(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=64, f_frsize=10**6))
    with pytest.raises(UserError, match=r"/dev/shm has 64 MB free, a sync holds 2 buckets of 50 MB there"):
        allocate_shared(50_000_000)


def names_of_this_process() -> set[str]:
    return {path.name for path in shared_memory.FOLDER.glob(f"torch_{os.getpid()}_*")}


def sync(sizes: list[int]) -> None:
    """Ten numbers to a bucket."""
    with shared_buffers(40) as buffers:
        packer = Packer(((f"w{i}", torch.ones(size)) for i, size in enumerate(sizes)), 40, buffers)
        while packer.has_more:
            tensor_payload(packer.pack())  # whose reader never comes
        if 13 in sizes:
            raise RuntimeError("in the middle")


def test_shared_buffers_stay_for_the_next_sync_and_leave_no_name_after_a_failure():
    shared_memory.release_idle()
    before = names_of_this_process()
    sync([10, 10, 10])
    kept = names_of_this_process() - before
    assert len(kept) == 2
    sync([10, 10, 10, 10])
    assert names_of_this_process() - before == kept
    sync([10, 100, 10])  # a buffer of more than two buckets does not stay
    assert len(names_of_this_process() - before) == 1
    with pytest.raises(RuntimeError, match="in the middle"):
        sync([10, 13, 10])
    assert names_of_this_process() == before
    sync([10, 10])
    shared_memory.release_idle()
    assert names_of_this_process() == before
