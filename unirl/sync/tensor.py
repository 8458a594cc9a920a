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
from unirl.sync.replies import BrokenOffError, Replies, answer
from unirl.sync.sender import Destination, Sender, Sent, Weights
from unirl.sync.shared_memory import shared_buffers
from unirl.sync.stream import Readers

CACHED_BYTES = 16_000_000
"""A bucket of a stream is still in the processor's cache when the server reads it."""


@dataclass(frozen=True)
class TensorSender(Sender):
    """Through CUDA memory where every server has the device that the weights are on, else through shared memory: as a
    stream where every server takes that, else by a request for each bucket.
    """

    async def _send(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        if all(server.streams for server in self.servers):
            await self._stream(weights, controls, sent)
        else:
            await self._send_each(weights, controls, sent)

    async def _stream(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        """One request. Where a server fails it ends for all of them."""
        replies = Replies(sent)
        bucket_bytes = min(self.bucket_bytes, CACHED_BYTES)
        try:
            async with Readers(sum(server.tp for server in self.servers), self.timeout_s) as readers:
                for server in self.servers:
                    body = {**readers.request(server.tp), **self._marks(is_last=True)}
                    replies.expect(server.url, controls[server.url].update_weights("tensor", body, timeout_s=None))
                with shared_buffers(self.bucket_bytes) as buffers:
                    packer = Packer(weights, bucket_bytes, buffers)
                    bucket = await asyncio.to_thread(packer.pack)
                    await replies.watch(readers.all_here())
                    readers.tell(bucket)
                    while packer.has_more:
                        await replies.watch(readers.room())
                        readers.tell(packer.pack())  # not in a thread: to wake it takes as long as a part of the copy
                    readers.tell_end()
                    await replies.rest(self.timeout_s)
        except BrokenOffError as error:
            sent.broken = True
            await replies.last_words(error)

    async def _send_each(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        """A request for each bucket. A server that fails is left out from then on."""
        with self._buffers() as buffers:
            packer = Packer(weights, self.bucket_bytes, buffers)
            on_their_way: list[asyncio.Task] = []
            while packer.has_more and len(sent.failures) < len(self.servers):
                while len(on_their_way) >= NUM_BUFFERS:
                    await on_their_way.pop(0)
                bucket = await asyncio.to_thread(packer.pack)  # the loop goes on with requests meanwhile
                if bucket.is_last:  # it marks the version
                    await asyncio.gather(*on_their_way)
                on_their_way.append(asyncio.create_task(self._hand_over(bucket, controls, sent)))
            await asyncio.gather(*on_their_way)
            if sent.failures:  # a server that failed may still read what it was told of
                buffers.clear()

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
            **self._marks(bucket.is_last),
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
