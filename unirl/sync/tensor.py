"""`sync.mode=tensor`: the servers of this machine read the weights from memory that they share with the trainer."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from unirl.rollout.sglang import ServerControl
from unirl.sync.buckets import NUM_BUFFERS, Bucket, Buffers, Packer
from unirl.sync.payload import device_uuid, tensor_payload
from unirl.sync.sender import Destination, Sender, Sent, Weights, answer
from unirl.sync.shared_memory import shared_buffers


@dataclass(frozen=True)
class TensorSender(Sender):
    """Through CUDA memory where every server has the device that the weights are on, else through shared memory."""

    async def _send(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        with self._buffers() as buffers:
            await self._send_from(Packer(weights, self.bucket_bytes, buffers), controls, sent)
            if sent.failures:  # a server that failed may still read what it was told of
                buffers.clear()

    async def _send_from(self, packer: Packer, controls: dict[str, ServerControl], sent: Sent) -> None:
        on_their_way: list[asyncio.Task] = []
        while packer.has_more and len(sent.failures) < len(self.servers):
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

    @contextmanager
    def _buffers(self) -> Iterator[Buffers]:
        if not self._on_shared_device():
            with shared_buffers(self.bucket_bytes) as buffers:
                yield buffers
            return
        yield Buffers(partial(torch.empty, dtype=torch.uint8, device="cuda"))

    def _on_shared_device(self) -> bool:
        """Whether every server has the CUDA device that this process computes on."""
        if not torch.cuda.is_available():
            return False
        here = device_uuid(torch.cuda.current_device())
        return all(here in server.gpus for server in self.servers)
