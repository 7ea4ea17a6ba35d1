"""A process that is asked to end leaves a truthful ledger, no process behind, and the exit code of the signal."""

from collections.abc import Iterator
from contextlib import contextmanager

from moonshift.infra.preemption import Preempted, check, forget, noted_signals, received


@contextmanager
def terminable() -> Iterator[None]:
    """Within, a signal ends the work; whatever exception it has become by then leaves as `Preempted`.

    While a flow runs, Prefect's own handler comes first: it lets the flow unwind and sends the signal again.
    """
    forget()
    with noted_signals():
        try:
            yield
        except Preempted:
            raise
        except BaseException as error:
            number = received()
            if number is not None:
                raise Preempted(number) from error
            raise
        check()
