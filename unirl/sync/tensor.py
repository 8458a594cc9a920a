"""`sync.mode=tensor`: the servers of this machine read the weights from memory that they share with the trainer."""

import asyncio
from dataclasses import dataclass

import torch

from unirl.rollout.sglang import ServerControl
from unirl.sync.buckets import NUM_BUFFERS, Bucket, Packer
from unirl.sync.payload import allocate_shared, device_uuid, tensor_payload
from unirl.sync.sender import Destination, Sender, Sent, Weights, answer


@dataclass(frozen=True)
class TensorSender(Sender):
    """Through CUDA memory where every server has the device that the weights are on, else through shared memory."""

    async def _send(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        with _Buffers(self._on_shared_device()) as buffers:
            await self._send_from(Packer(weights, self.bucket_bytes, buffers.allocate), controls, sent)

    async def _send_from(self, packer: Packer, controls: dict[str, ServerControl], sent: Sent) -> None:
        on_their_way: list[asyncio.Task] = []
        while packer.has_more:
            while len(on_their_way) >= NUM_BUFFERS:
                await on_their_way.pop(0)
            bucket = await asyncio.to_thread(packer.pack)  # the loop goes on with requests meanwhile
            if bucket.is_last:  # it marks the version
                await asyncio.gather(*on_their_way)
            on_their_way.append(asyncio.create_task(self._hand_over(bucket, controls, sent)))
        await asyncio.gather(*on_their_way)

    async def _hand_over(self, bucket: Bucket, controls: dict[str, ServerControl], sent: Sent) -> None:
        servers = [server for server in self.servers if server.url not in sent.failures]
        calls = [self._post(bucket, server, controls[server.url]) for server in servers]
        for server, outcome in zip(servers, await asyncio.gather(*calls), strict=True):
            if outcome is not None:
                sent.failures.setdefault(server.url, outcome)

    async def _post(self, bucket: Bucket, server: Destination, control: ServerControl) -> Exception | None:
        body = {
            "serialized_named_tensors": [tensor_payload(bucket) for _ in range(server.tp)],
            "load_format": "flattened_bucket",
            **self._marks(bucket),
        }
        return await answer(control.update_weights("tensor", body, timeout_s=self.timeout_s))

    def _on_shared_device(self) -> bool:
        """Whether every server has the CUDA device that this process computes on."""
        if not torch.cuda.is_available():
            return False
        here = device_uuid(torch.cuda.current_device())
        return all(here in server.gpus for server in self.servers)


_kept: list[torch.Tensor] = []
"""Buffers in shared memory that are not in use: new ones cost as much as filling them."""


class _Buffers:
    """Those of one sync. In shared memory they are kept for the next one, at most NUM_BUFFERS of them."""

    def __init__(self, on_cuda: bool):
        self._on_cuda = on_cuda
        self._taken: list[torch.Tensor] = []

    def __enter__(self) -> "_Buffers":
        return self

    def __exit__(self, *exc_info) -> None:
        _kept.extend(self._taken)
        del _kept[:-NUM_BUFFERS]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes or more] uint8."""
        if self._on_cuda:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        kept = _kept.pop() if _kept else None
        taken = kept if kept is not None and len(kept) >= num_bytes else allocate_shared(num_bytes)
        self._taken.append(taken)
        return taken
