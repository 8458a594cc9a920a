"""`sync.mode=distributed`: every pipeline stage broadcasts its weights to all servers, over NCCL or gloo."""

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

from unirl.rollout.sglang import STREAM_FORMAT, ServerControl
from unirl.sync.buckets import Packer
from unirl.sync.groups import Group, current_group, drop_group, in_daemon, open_group
from unirl.sync.replies import BrokenOffError, Replies
from unirl.sync.sender import Sender, Sent, Weights
from unirl.sync.stream import to_broadcast


@dataclass(frozen=True)
class BroadcastSender(Sender):
    """owner: names the group, which is made where it does not exist or is of other servers."""

    owner: str

    async def _send(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        replies = Replies(sent)
        try:
            group = await self._group(controls, replies)
            packer = Packer(weights, self.bucket_bytes, group.buffers)
            if group.device.type == "cpu" and all(server.streams for server in self.servers):
                await self._stream(packer, group, controls, replies)
            else:
                await self._send_each(packer, group, controls, replies)
            group.rest(self.bucket_bytes)
        except BrokenOffError as error:
            sent.broken = True
            await drop_group(self.owner, controls)
            await replies.last_words(error)
        except BaseException:  # servers that take a stream wait for more of it
            await drop_group(self.owner, controls)
            raise

    async def _send_each(
        self, packer: Packer, group: Group, controls: dict[str, ServerControl], replies: Replies
    ) -> None:
        """A request for each bucket."""
        while packer.has_more:
            bucket = await asyncio.to_thread(packer.pack)
            replies.raise_failure()
            self._announce(
                group,
                controls,
                replies,
                names=[entry.name for entry in bucket.entries],
                dtypes=[entry.dtype_name for entry in bucket.entries],
                shapes=[list(entry.shape) for entry in bucket.entries],
                load_format="flattened_bucket",
                **self._marks(bucket.is_last),
                timeout_s=self.timeout_s,
            )
            await replies.watch(in_daemon(partial(group.broadcast, [bucket.flat], self._timeout)))
        await replies.rest(self.timeout_s)

    async def _stream(self, packer: Packer, group: Group, controls: dict[str, ServerControl], replies: Replies) -> None:
        """One request. A bucket is packed while the one before is on its way; sizes and description come before it."""
        nothing: dict[str, list] = {"names": [], "dtypes": [], "shapes": []}
        self._announce(
            group, controls, replies, load_format=STREAM_FORMAT, **nothing, **self._marks(is_last=True), timeout_s=None
        )
        on_its_way = in_daemon(lambda: None)
        while packer.has_more:
            bucket = await asyncio.to_thread(packer.pack)
            await replies.watch(on_its_way)
            on_its_way = in_daemon(partial(group.broadcast, to_broadcast(bucket), self._timeout))
        await replies.watch(on_its_way)
        await replies.watch(in_daemon(partial(group.broadcast, to_broadcast(None), self._timeout)))
        await replies.rest(self.timeout_s)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s)

    async def _group(self, controls: dict[str, ServerControl], replies: Replies) -> Group:
        group = current_group(self.owner, self.servers)
        if group is not None:
            return group
        await drop_group(self.owner, controls)
        invitation, join = open_group(self.owner, self.servers, self.timeout_s)
        rank = 1
        for server in self.servers:
            body = invitation.body(rank)
            replies.expect(
                server.url,
                controls[server.url].client.post("/init_weights_update_group", body, timeout_s=self.timeout_s),
            )
            rank += server.tp
        group = await replies.watch(in_daemon(join))
        await replies.rest(self.timeout_s)
        return group

    def _announce(
        self,
        group: Group,
        controls: dict[str, ServerControl],
        replies: Replies,
        *,
        timeout_s: float | None,
        **told: Any,
    ) -> None:
        for server in self.servers:
            body = {"group_name": group.name, **told}
            call = controls[server.url].update_weights("distributed", body, timeout_s=timeout_s)
            replies.expect(server.url, call)
