"""The loop in a thread: results, errors, and interrupts of the one who waits."""

import asyncio
import signal

import pytest

from unirl.rollout.sglang.background import BackgroundLoop


@pytest.fixture
def loop():
    loop = BackgroundLoop("test")
    yield loop
    loop.close()
    loop.close()


def test_results_and_errors_come_back(loop):
    async def divide(number: int) -> float:
        await asyncio.sleep(0)
        return 1 / number

    assert loop.run(divide(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        loop.run(divide(0))


def test_an_interrupted_wait_ends_the_work_first(loop):
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            ended.append(True)

    def stop(number, frame) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert ended == [True]
