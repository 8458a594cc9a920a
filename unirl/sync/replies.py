"""The answers of servers, awaited while something else goes on that needs all of them."""

import asyncio
from collections.abc import Awaitable

from unirl.rollout.sglang import RequestRefusedError, ServerLostError
from unirl.sync.sender import Sent

_LAST_WORDS_S = 10.0
"""How long servers have to say what happened, once it is broken off."""


class BrokenOffError(Exception):
    """What a sender does together with its servers has ended early."""


async def answer(call: Awaitable) -> Exception | None:
    """How a server takes a request: None, or why not."""
    try:
        await call
    except (ServerLostError, RequestRefusedError) as error:
        return error
    return None


class Replies:
    """Of the servers that take part. Failures are noted in `sent`."""

    def __init__(self, sent: Sent):
        self._sent = sent
        self._pending: dict[asyncio.Task, str] = {}

    def expect(self, url: str, call: Awaitable) -> None:
        """Send the request."""
        self._pending[asyncio.create_task(answer(call))] = url

    async def watch(self, awaitable: Awaitable):
        """Its result. Raises BrokenOffError as soon as a server fails, or where it does."""
        future = asyncio.ensure_future(awaitable)
        while not future.done():
            await asyncio.wait({future, *self._pending}, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                try:
                    self.raise_failure()
                except BrokenOffError:
                    future.cancel()
                    raise
        if isinstance(error := future.exception(), RuntimeError):  # gloo and NCCL have no narrower class
            raise BrokenOffError(str(error)) from error
        return future.result()

    def raise_failure(self) -> None:
        """Raise BrokenOffError where an answer that has come tells of one."""
        for task in [task for task in self._pending if task.done()]:
            url, failure = self._pending.pop(task), task.result()
            if failure is not None:
                self._sent.failures[url] = failure
        if self._sent.failures:
            raise BrokenOffError("; ".join(map(str, self._sent.failures.values())))

    async def rest(self, timeout_s: float) -> None:
        """Wait for all of them, so long."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._pending:
                    await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
                    self.raise_failure()
        except TimeoutError:
            raise BrokenOffError(f"a server did not answer within {timeout_s:g} s") from None

    async def last_words(self, error: BrokenOffError) -> None:
        """Collect what still comes within a moment; who says nothing is lost."""
        if self._pending:
            await asyncio.wait(self._pending, timeout=_LAST_WORDS_S)
        for task, url in self._pending.items():
            failure = task.result() if task.done() else ServerLostError(f"{url}: says nothing")
            task.cancel()
            if failure is not None:
                self._sent.failures.setdefault(url, failure)
        self._pending.clear()
