"""SIGTERM and SIGINT, noted before anybody handles them: an exception may be lost on its way, the note is not.

A signal raises in the middle of whatever runs, and a library may turn that exception into another one, or drop it. So
every decision about how an attempt ended reads the note: the state in the ledger, the exit code, and the check before
each stage. SIGTERM lets a stage end within its grace period (`patient`); Ctrl-C, and a second signal, do not wait.

Whoever sent it ends the process by force when the grace period is over: whatever is waited for on the way out, a ledger
that is locked or a server that hangs, is waited for no longer than `seconds_left`.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORD_S = 3.0
"""Seconds, after a stage was abandoned, to write how the attempt ended."""


class Preempted(BaseException):
    """The process was asked to end by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class _Note:
    """The first signal of this process; there is one, since signals belong to processes."""

    number: int | None = None
    grace_s: float = 0.0
    """seconds that what goes on may still take"""
    waiting: bool = False
    """whether it is being let end"""
    at: float = 0.0
    """time.monotonic() of the signal that counts: the second one, where it cut the waiting short"""
    patiently: bool = False
    """whether it was a SIGTERM alone"""


class _Noting:
    """A handler that notes a signal, then hands the first one on to the handler of before."""

    def __init__(self, number: int) -> None:
        before: Any = signal.getsignal(number)
        # handing on to another one of these would look like a second signal to it
        self.before: Callable[[int, FrameType | None], Any] | int | None = (
            before.before if isinstance(before, _Noting) else before
        )
        self.installed: Any = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _Note.number is not None and not _Note.waiting:
            return  # what is being cleaned up is not interrupted again
        _Note.at, _Note.patiently = time.monotonic(), _Note.number is None and number == signal.SIGTERM
        _Note.number = _Note.number or number
        if number == signal.SIGTERM and _Note.grace_s > 0 and not _Note.waiting:
            _Note.waiting = True
            signal.signal(signal.SIGALRM, lambda _number, frame: self._interrupt(number, frame))
            signal.setitimer(signal.ITIMER_REAL, _Note.grace_s)
        else:
            self._interrupt(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        _Note.waiting = False
        if callable(self.before):
            self.before(number, frame)
        raise Preempted(number)


def received() -> int | None:
    """The signal that asked this process to end, if one did."""
    return _Note.number


def check() -> None:
    """Raises Preempted where a signal was received, even if its exception was lost."""
    if _Note.number is not None:
        raise Preempted(_Note.number)


def seconds_left(grace_s: float) -> float:
    """Seconds within which a process that was asked to end has to be done, infinity where it was not; `grace_s`: those
    that SIGTERM allows."""
    if _Note.number is None:
        return math.inf
    return _Note.at + (grace_s if _Note.patiently else 0.0) + LAST_WORD_S - time.monotonic()


def forget() -> None:
    """Begin without a note."""
    _Note.number = None


@contextmanager
def patient(grace_s: float) -> Iterator[None]:
    """Within, SIGTERM interrupts only after `grace_s` seconds; `check` afterwards raises for one that was let pass."""
    _Note.grace_s = grace_s
    try:
        yield
    finally:
        _Note.grace_s = 0.0
        if _Note.waiting:
            _Note.waiting = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)


@contextmanager
def noted_signals() -> Iterator[None]:
    """Within, signals are noted; those who handled them before still get them. Elsewhere than in the main thread
    nothing is changed: signals do not arrive there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: _Noting(number) for number in _SIGNALS}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler.installed)
