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
        packer = Packer(weights, self.bucket_bytes, self._allocate)
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

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        if torch.cuda.is_available():
            here = device_uuid(torch.cuda.current_device())
            if all(here in server.gpus for server in self.servers):
                return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        return allocate_shared(num_bytes)
