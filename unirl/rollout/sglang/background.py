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
        ended, tasks = threading.Event(), []

        def start() -> None:
            tasks.append(self._loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    def close(self) -> None:
        """Stop the loop; its tasks must have ended. May be called twice."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
