"""A signal is noted, whatever becomes of its exception."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from moonshift.flows.termination import terminable
from moonshift.infra import preemption
from moonshift.infra.preemption import LAST_WORD_S, Preempted, noted_signals, patient


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    # a shell starts what it puts in the background with SIGINT ignored, and Python keeps that
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    preemption.forget()
    yield
    preemption.forget()
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_as_preempted(number: signal.Signals) -> None:
    with pytest.raises(Preempted) as caught, terminable():
        os.kill(os.getpid(), number)
        raise AssertionError("the signal did not raise")
    assert caught.value.number == number and preemption.received() == number


def test_an_exception_that_a_library_made_of_it_is_preempted_too() -> None:
    with pytest.raises(Preempted), terminable():
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise ValueError("Task run is not set") from error


def test_an_exception_that_is_dropped_is_found_at_the_next_check() -> None:
    with noted_signals():
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Preempted):
            preemption.check()


def test_the_handler_of_before_gets_the_signal_once_and_cleaning_up_is_not_interrupted() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(Preempted), terminable(), noted_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGINT)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_without_a_signal_nothing_changes() -> None:
    with pytest.raises(KeyError), terminable():
        raise KeyError("mine")
    assert preemption.received() is None


def test_within_its_grace_a_stage_ends_and_the_next_check_raises() -> None:
    ended = False
    with pytest.raises(Preempted), terminable():
        with patient(30.0):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
            ended = True
        preemption.check()
    assert ended and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_past_its_grace_a_stage_is_abandoned() -> None:
    started = time.monotonic()
    with pytest.raises(Preempted) as caught, terminable(), patient(0.2):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    assert caught.value.number == signal.SIGTERM and 0.15 < time.monotonic() - started < 10


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(second: signal.Signals) -> None:
    with pytest.raises(Preempted) as caught, terminable(), patient(30.0):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
        raise AssertionError("the second signal did not raise")
    assert caught.value.number == signal.SIGTERM


def test_ctrl_c_does_not_wait() -> None:
    with pytest.raises(Preempted), terminable(), patient(30.0):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("Ctrl-C did not raise")


def test_what_is_left_counts_from_the_signal_and_is_nothing_after_a_second_one_or_ctrl_c() -> None:
    assert preemption.seconds_left(30.0) == float("inf")
    with suppress(Preempted), terminable(), patient(30.0):
        os.kill(os.getpid(), signal.SIGTERM)
        assert 30.0 < preemption.seconds_left(30.0) < 30.0 + LAST_WORD_S
        os.kill(os.getpid(), signal.SIGTERM)
    assert 0 < preemption.seconds_left(30.0) < LAST_WORD_S
    preemption.forget()
    with suppress(Preempted), terminable(), patient(30.0):
        os.kill(os.getpid(), signal.SIGINT)
    assert 0 < preemption.seconds_left(30.0) < LAST_WORD_S
    preemption.forget()
    with suppress(Preempted), terminable():  # between two stages: it ends at once, and may take its time for it
        os.kill(os.getpid(), signal.SIGTERM)
    assert 30.0 < preemption.seconds_left(30.0) < 30.0 + LAST_WORD_S
