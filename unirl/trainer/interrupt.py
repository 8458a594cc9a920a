"""Ctrl-C, SIGTERM and a lost terminal: stop at a point from which the run continues as if nothing had happened."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_AGAIN_S = 0.1


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
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._raise_again)
        self._report_ignored, sys.unraisablehook = sys.unraisablehook, self._take_ignored
        return self

    def __exit__(self, *exc_info) -> None:
        sys.unraisablehook = self._report_ignored
        signal.setitimer(signal.ITIMER_REAL, 0)
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
        if self.requested:  # and ignored until the end
            raise StopRequested

    def _handle(self, number: int, frame) -> None:
        signal.alarm(0)  # Ray, where it got SIGTERM first, would abort the process in a moment
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._abandonable:
            raise StopRequested

    def _take_ignored(self, ignored) -> None:
        """The interpreter ignores what is raised in some callbacks, as those of a fork: raise it again in a moment."""
        if ignored.exc_type is StopRequested:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            self._report_ignored(ignored)

    def _raise_again(self, number: int, frame) -> None:
        if self._abandonable:
            raise StopRequested
