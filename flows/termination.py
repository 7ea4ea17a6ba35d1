"""SIGTERM as an exception, so that a preempted process leaves a truthful ledger and no process behind."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """The process was asked to end by SIGTERM."""


@contextmanager
def terminable() -> Iterator[None]:
    """Within, SIGTERM raises `Terminated` in the main thread, once: what is being cleaned up is not interrupted again.

    While a flow runs, Prefect's own handler comes first: it lets the flow unwind and then sends the signal again, to
    this one.
    """
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
