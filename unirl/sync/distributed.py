"""`sync.mode=distributed`: every pipeline stage broadcasts its weights to all servers, over NCCL or gloo."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from unirl.rollout.sglang import ServerControl, ServerLostError
from unirl.sync.buckets import Bucket, Packer
from unirl.sync.groups import Group, current_group, drop_group, in_daemon, open_group
from unirl.sync.sender import Sender, Sent, Weights, answer

_LAST_WORDS_S = 10.0
"""How long servers have to say what happened, once the group is broken."""


class GroupError(Exception):
    """The group of a sender and its servers does not work (any more)."""


@dataclass(frozen=True)
class BroadcastSender(Sender):
    """owner: names the group, which is made where it does not exist or is of other servers."""

    owner: str

    async def _send(self, weights: Weights, controls: dict[str, ServerControl], sent: Sent) -> None:
        replies = _Replies(sent)
        try:
            group = await self._group(controls, replies)
            timeout = timedelta(seconds=self.timeout_s)
            packer = Packer(weights, self.bucket_bytes, group.buffers)
            while packer.has_more:
                bucket = await asyncio.to_thread(packer.pack)
                replies.raise_failure()
                self._announce(bucket, group, controls, replies)
                await replies.watch(in_daemon(partial(group.broadcast, bucket.flat, timeout)))
            await replies.rest()
            group.rest(self.bucket_bytes)
        except GroupError as error:
            sent.broken = True
            await drop_group(self.owner, controls)
            await replies.last_words(error)

    async def _group(self, controls: dict[str, ServerControl], replies: "_Replies") -> Group:
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
        await replies.rest()
        return group

    def _announce(self, bucket: Bucket, group: Group, controls: dict[str, ServerControl], replies: "_Replies") -> None:
        body = {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            **self._marks(bucket),
        }
        for server in self.servers:
            call = controls[server.url].update_weights("distributed", body, timeout_s=self.timeout_s)
            replies.expect(server.url, call)


class _Replies:
    """Answers that are awaited while something else goes on. Failures are noted in `sent`."""

    def __init__(self, sent: Sent):
        self._sent = sent
        self._pending: dict[asyncio.Task, str] = {}

    def expect(self, url: str, call: Awaitable) -> None:
        """Send the request."""
        self._pending[asyncio.create_task(answer(call))] = url

    async def watch(self, future: asyncio.Future):
        """The future's result. Raises GroupError as soon as a server fails, or where the future does."""
        while not future.done():
            await asyncio.wait({future, *self._pending}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                self.raise_failure()
        if isinstance(error := future.exception(), RuntimeError):  # gloo and NCCL have no narrower class
            raise GroupError(str(error)) from error
        return future.result()

    def raise_failure(self) -> None:
        """Raise GroupError where an answer that has come tells of one."""
        for task in [task for task in self._pending if task.done()]:
            url, failure = self._pending.pop(task), task.result()
            if failure is not None:
                self._sent.failures[url] = failure
        if self._sent.failures:
            raise GroupError("; ".join(map(str, self._sent.failures.values())))

    async def rest(self) -> None:
        """Wait for all of them."""
        while self._pending:
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
            self.raise_failure()

    async def last_words(self, error: GroupError) -> None:
        """Collect what still comes within a moment; who says nothing is lost."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=_LAST_WORDS_S)
        for task, url in self._pending.items():
            failure = task.result() if task.done() else ServerLostError(f"{url}: does not leave the broken group")
            task.cancel()
            if failure is not None:
                self._sent.failures.setdefault(url, failure)
        self._pending.clear()
