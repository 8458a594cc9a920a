"""Weights as a stream: one request to a server, and buckets while it lasts.

The servers' end is `unirl/rollout/sglang/cpu_stubs/unirl_weight_stream.py`, which says what for.
"""

import asyncio
import json
import os
import secrets
import socket
import struct
from typing import Any

import torch

from unirl.rollout.sglang import STREAM_FORMAT
from unirl.sync.buckets import NUM_BUFFERS, Bucket
from unirl.sync.payload import plain_payload
from unirl.sync.replies import BrokenOffError
from unirl.sync.shared_memory import name_of


def _entries(bucket: Bucket) -> list[tuple]:
    """Its tensors, in JSON's types."""
    return [(entry.name, entry.dtype_name, entry.shape, entry.start, entry.end) for entry in bucket.entries]


def to_broadcast(bucket: Bucket | None) -> list[torch.Tensor]:
    """What is broadcast of a bucket, one tensor after the other; None: there are no more.

    [2] int64, the sizes of the others (0 for the first of them at the end); [so many] uint8, its tensors in JSON;
    [so many] uint8, what is in them.
    """
    if bucket is None:
        return [torch.zeros(2, dtype=torch.int64)]
    description = torch.frombuffer(bytearray(json.dumps(_entries(bucket)).encode()), dtype=torch.uint8)
    return [torch.tensor([len(description), len(bucket.flat)]), description, bucket.flat]


class Readers:
    """`count` processes of servers that read buckets from shared memory of this process, all of them every bucket.

    timeout_s: limit for one of them to come, or to read a bucket. Where one is late or goes, BrokenOffError is raised.
    To leave the context is to leave them: who has not been told of the end takes that for a failure.
    """

    def __init__(self, count: int, timeout_s: float):
        self._count = count
        self._timeout_s = timeout_s
        self._address = f"unirl-{secrets.token_hex(16)}"
        self._here: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._all_here = asyncio.Event()
        self._num_unread = 0

    async def __aenter__(self) -> "Readers":
        # A name that begins with a zero byte is in no file system, so that nothing is left of it.
        self._listening = await asyncio.start_unix_server(self._welcome, path=f"\0{self._address}")
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._listening.close()
        for _, writer in self._here:
            writer.close()

    def request(self, tp: int) -> dict[str, Any]:
        """Body of the request that brings the ranks of a server here."""
        payload = plain_payload({"address": self._address, "timeout_s": self._timeout_s})
        return {"serialized_named_tensors": [payload] * tp, "load_format": STREAM_FORMAT}

    async def all_here(self) -> None:
        """Wait for them."""
        await self._within(self._all_here.wait())

    async def room(self) -> None:
        """Wait until a buffer is free: every reader has read the bucket that was in it."""
        if self._num_unread == NUM_BUFFERS:
            await self._within(asyncio.gather(*(reader.readexactly(1) for reader, _ in self._here)))
            self._num_unread -= 1

    def tell(self, bucket: Bucket) -> None:
        """Of a bucket, which is in shared memory."""
        name, size = name_of(bucket.flat)
        self._say({"memory": name, "size": size, "entries": _entries(bucket)})
        self._num_unread += 1

    def tell_end(self) -> None:
        """There are no more."""
        self._say({})

    def _say(self, told: dict[str, Any]) -> None:
        for _, writer in self._here:
            writer.write(json.dumps(told).encode() + b"\n")

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid() or self._all_here.is_set():  # the names of such sockets can be read by everybody
            writer.close()
            return
        self._here.append((reader, writer))
        if len(self._here) == self._count:
            self._all_here.set()

    async def _within(self, awaitable: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await awaitable
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            late = f"nothing within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else repr(error)
            raise BrokenOffError(f"the servers that read the weights: {late}") from error
