"""Ctrl-C, SIGTERM and a lost terminal: stop at a point from which the run continues as if nothing had happened."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequested(BaseException):
    """Raised inside `StopSignal.abandonable`; not an Exception, so that nothing on the way swallows it."""


class StopSignal:
    """While entered, the first Ctrl-C, SIGTERM or SIGHUP asks for a stop and a second one stops at once, unsaved.

    Work inside `abandonable()` is left at once by raising StopRequested; work outside it is finished first.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.requested = False
        self._abandonable = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc_info) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """Work that may be thrown away, since a resumed run repeats it exactly."""
        if self.requested:
            raise StopRequested
        self._abandonable = True
        try:
            yield
        finally:
            self._abandonable = False
        if self.requested:  # raised where the interpreter ignores exceptions, as in a destructor
            raise StopRequested

    def _handle(self, number: int, frame) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._abandonable:
            raise StopRequested
