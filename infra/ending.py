"""How an attempt ended, told to the ledger and to MLflow on the way out, whatever the way.

Invariant: what ended the attempt is what leaves it. A ledger or a server that cannot be told neither hides that nor,
after a signal, holds it up: an attempt that said nothing is found out by its lease, and its run goes on all the same.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from signal import Signals

from moonshift.core.config import mask
from moonshift.core.errors import LeaseLostError, MoonshiftError, StorageError

from . import preemption
from .ledger import Lease, Ledger, RunState
from .tracking import Tracker

log = logging.getLogger(__name__)


def state_after(error: BaseException | None) -> RunState:
    """How an attempt ended by what left it: PREEMPTED after a signal, whatever its exception has become, or a
    cancellation; PAUSED where space is missing; FAILED after an error or an exit; else COMPLETED."""
    if error is None:
        return RunState.COMPLETED
    if preemption.received() is not None:
        return RunState.PREEMPTED
    if isinstance(error, StorageError):
        return RunState.PAUSED
    return RunState.FAILED if isinstance(error, Exception | SystemExit) else RunState.PREEMPTED


@contextmanager
def ending(ledger: Ledger, lease: Lease) -> Iterator[None]:
    """Write how the attempt ended; secrets in an error are not kept."""
    try:
        yield
    except BaseException as error:
        number = preemption.received()
        reason = mask("error", f"{type(error).__name__}: {error}") if number is None else Signals(number).name
        state = state_after(error)
        try:
            ledger.release(lease, state, reason)
        except LeaseLostError:
            pass  # its successor has closed this attempt
        except MoonshiftError as untold:
            # the first error is the one to raise, and the ledger may be on the very disk that is full
            log.error(
                "attempt %d of run %s ended as %s, and the ledger could not be told: %s\n"
                "Its lease ends by itself, and `moonshift resume %s` goes on.",
                *(lease.attempt_number, lease.run_id, state, untold, lease.run_id),
            )
        raise
    else:
        ledger.release(lease, RunState.COMPLETED)


@contextmanager
def tracking(tracker: Tracker) -> Iterator[None]:
    """Start the sender, and end the MLflow run as what the attempt was."""
    tracker.start()
    ended: BaseException | None = None
    try:
        yield
    except BaseException as error:
        ended = error
        raise
    finally:
        tracker.close(state_after(ended))
