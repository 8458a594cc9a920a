"""An asyncio loop in a thread of its own, for a caller that is not asynchronous."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any


class BackgroundLoop:
    """Runs coroutines to their end while the caller waits."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine) -> Any:
        """The coroutine's result. Where the wait is interrupted (Ctrl-C), it is cancelled and has ended on return."""
        ended = threading.Event()

        async def watched() -> Any:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():
                ended.wait()
            raise

    def close(self) -> None:
        """Stop the loop; its tasks must have ended. May be called twice."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
