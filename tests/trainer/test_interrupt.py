import os
import signal
import time

import pytest

from unirl.trainer.interrupt import StopRequested, StopSignal


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two bytecodes


@pytest.mark.parametrize("number", StopSignal.SIGNALS)
def test_abandonable_work_is_left_at_once(number):
    def work(stop):
        with stop.abandonable():
            send(number)
            pytest.fail("work went on")

    with StopSignal() as stop:
        with pytest.raises(StopRequested):
            work(stop)
        assert stop.requested


def test_other_work_is_finished_and_the_next_abandonable_part_not_begun():
    with StopSignal() as stop:
        send(signal.SIGINT)
        finished = True
        with pytest.raises(StopRequested), stop.abandonable():
            pytest.fail("work began")
    assert finished


def test_a_stop_that_the_interpreter_ignores_is_raised_again():
    class Ends:
        def __del__(self):
            send(signal.SIGTERM)  # what is raised in a destructor is ignored

    def work(stop):
        with stop.abandonable():
            Ends()
            time.sleep(100)
            pytest.fail("work went on")

    with StopSignal() as stop, pytest.raises(StopRequested):
        work(stop)


def test_second_signal_stops_at_once():
    with StopSignal() as stop:
        send(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
