"""A stream of weights, between its two ends, without a server."""

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from unirl.cluster.spawn import run_ranks
from unirl.rollout.sglang.launch import CPU_STUBS
from unirl.sync.buckets import Buffers, Packer
from unirl.sync.groups import Group
from unirl.sync.replies import BrokenOffError
from unirl.sync.shared_memory import allocate_shared, release_shared
from unirl.sync.stream import Readers, to_broadcast


def server_end():
    """The module, as a server has it."""
    spec = importlib.util.spec_from_file_location("unirl_weight_stream", CPU_STUBS / "unirl_weight_stream.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some_weights() -> dict[str, torch.Tensor]:
    """Of awkward sizes; `large` is larger than a bucket, others are of other dtypes."""
    torch.manual_seed(0)
    shapes = {
        "a": (3,),
        "b": (5, 2),
        "large": (400,),
        "c": (),
        "d": (0, 4),
        "e": (9,),
        **{f"w{i}": (7,) for i in range(50)},
    }
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    weights["empty"] = torch.empty(0, 3, dtype=torch.float16)  # a bucket without a byte
    weights["bf16"] = torch.randn(7).bfloat16()
    weights["double"] = torch.randn(3, 3, dtype=torch.float64)
    return weights


class Reading(threading.Thread):
    """A server's process."""

    def __init__(self, address: str, timeout_s: float = 30.0, use: Callable[[], None] = lambda: None):
        super().__init__(daemon=True)
        self._where = {"address": address, "timeout_s": timeout_s}
        self._use = use
        self.found: dict[str, torch.Tensor] = {}
        self.num_buckets = 0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for flat, entries in server_end().from_memory(**self._where):
                self.num_buckets += 1
                self._use()
                for entry in entries:
                    part = flat[entry.start_idx : entry.end_idx].view(entry.dtype).view(entry.shape)
                    self.found[entry.name] = part.clone()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.error = error


@pytest.fixture
def buffers():
    buffers = Buffers(allocate_shared, release_shared)
    yield buffers
    buffers.clear()


def send(
    weights: dict[str, torch.Tensor], buffers: Buffers, make_readers, *, timeout_s: float = 30.0, end: bool = True
):
    """What became of two readers; `make_readers` starts them."""

    async def run() -> None:
        async with Readers(2, timeout_s) as readers:
            started.extend(make_readers(readers._address))
            await readers.all_here()
            packer = Packer(iter(weights.items()), 60, buffers)
            while packer.has_more:
                await readers.room()
                readers.tell(packer.pack())
            if end:
                readers.tell_end()
                await asyncio.to_thread(lambda: [reader.join(30) for reader in started])

    started: list[Reading] = []
    try:
        asyncio.run(run())
    finally:
        for reader in started:
            reader.join(30)
    return started


def assert_all_found(found: dict[str, torch.Tensor]) -> None:
    weights = some_weights()
    assert list(found) == list(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=0, rtol=0)


def test_every_reader_gets_every_weight(buffers):
    readers = send(some_weights(), buffers, lambda address: [Reading(address), Reading(address, use=slowly)])
    for reader in readers:
        assert reader.error is None
        assert reader.num_buckets > 20  # so that each buffer was used again and again
        assert_all_found(reader.found)


def slowly() -> None:
    time.sleep(0.005)


def test_a_reader_learns_that_the_trainer_left(buffers):
    for reader in send(some_weights(), buffers, lambda address: [Reading(address), Reading(address)], end=False):
        assert isinstance(reader.error, ConnectionError)


def test_a_reader_does_not_wait_for_ever(buffers):
    async def run() -> Reading:
        async with Readers(1, 30.0) as readers:
            reader = Reading(readers._address, timeout_s=0.2)
            await readers.all_here()
            await asyncio.to_thread(reader.join, 30)
            return reader

    assert isinstance(asyncio.run(run()).error, TimeoutError)


def fail() -> None:
    raise ValueError("cannot load it")


def test_the_trainer_learns_that_a_reader_left(buffers):
    with pytest.raises(BrokenOffError, match=r"weights: (IncompleteRead|ConnectionReset|BrokenPipe)Error"):
        send(some_weights(), buffers, lambda address: [Reading(address), Reading(address, use=fail)])


@pytest.mark.parametrize("num_readers", [1, 2])
def test_the_trainer_does_not_wait_for_ever(buffers, num_readers):
    """For one that does not come, and for one that does not read."""
    hang = threading.Event()
    started = time.monotonic()
    with pytest.raises(BrokenOffError, match=r"the servers that read the weights: nothing within 0\.5 s"):
        send(
            some_weights(),
            buffers,
            lambda address: [Reading(address, use=lambda: hang.wait(2)) for _ in range(num_readers)],
            timeout_s=0.5,
        )
    assert time.monotonic() - started < 20
    hang.set()


def broadcast_rank() -> list[tuple[str, torch.Tensor]]:
    group = dist.group.WORLD
    if dist.get_rank() == 0:
        sender = Group("stream", (), group._get_backend(torch.device("cpu")), torch.device("cpu"))
        packer = Packer(iter(some_weights().items()), 60, sender.buffers)
        while packer.has_more:
            sender.broadcast(to_broadcast(packer.pack()), dist.default_pg_timeout)
        sender.broadcast(to_broadcast(None), dist.default_pg_timeout)
        return []
    return list(server_end().from_group(group))  # which holds on to all of them


def test_every_weight_is_broadcast_and_may_be_kept():
    _, found, others = run_ranks(broadcast_rank, 3, timeout_s=120)
    assert_all_found(dict(found))
    assert_all_found(dict(others))


def test_memory_is_given_out_again_when_nobody_refers_to_it():
    memory = server_end().Memory()
    first = memory.take(1000)
    place = first.data_ptr()
    part = first[100:200].view(torch.float32)
    second = memory.take(800)
    assert second.data_ptr() != place
    del first
    assert memory.take(10).data_ptr() != place  # a part is still in use
    del part
    again = memory.take(900)
    assert again.data_ptr() == place
    assert len(again) == 900
    del again, second
    assert len(memory.take(5000)) == 5000
    assert len(memory._kept) == 1  # what was too small is gone
