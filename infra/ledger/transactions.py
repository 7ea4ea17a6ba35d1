"""Short transactions on one database, repeated where a passing fault broke them and a second time does no harm.

A lock that lasts beyond the time-out, a server that starts again, a lost connection: none of them need end a night's
run. A transaction that surely left nothing is done again. One whose COMMIT was on its way when the connection broke
may have been kept: only work that knows how to find itself (`settle`) is done again after that, and only when it is
not there.

A process that was asked to end has no minute left: how long transactions may go on waiting can be cut short while they
wait, and is looked at again and again. It is not told to them, because a signal's handler must take no lock.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    retry_if_exception_type,
    wait_random_exponential,
)

from moonshift.core.errors import CommitUnknownError, LedgerAwayError, LedgerError

from .engine import in_slices, read_only
from .faults import LockedError, in_doubt, ledger_errors, where

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_LOOK_S = 0.25
"""how often a pause looks whether it should end"""


def never_found(_session: Session) -> bool:
    """For work that leaves the same when it is done twice: nothing to look for, do it again."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a transaction is tried."""

    lock_s: float
    """seconds that it waits for a lock before that is a fault"""
    retry_s: float
    """seconds from its begin within which it is begun again after a fault; 0: once only"""
    seconds_left: Callable[[], float] = lambda: math.inf
    """until when, from now, anything may be waited for; past it a transaction has one try of half a second"""


class Transactions:
    """Opens a session for each; safe to use from several threads.

    Example: `transactions.write(lambda session: session.add(row))`.
    """

    def __init__(self, engine: Engine, patience: Patience) -> None:
        self.engine = engine
        self._read_engine, self._write_engine = read_only(engine), in_slices(engine)
        self._patience = patience
        self._closed = threading.Event()

    def close(self) -> None:
        """Close the pooled connections; whoever waits to try again gives up, a later transaction raises LedgerError."""
        self._closed.set()
        self.engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session that only reads; waits for a server that is away before it begins, not in its middle.

        Raises LedgerAwayError when the ledger stays away, LedgerError when it was closed.
        """
        with Session(self._read_engine) as session:
            self._retrying(LedgerAwayError)(self._connect, session)
            with ledger_errors(self.engine):
                yield session

    def once(self, work: Callable[[Session], T]) -> T:
        """Do `work` and commit it, one time. Raises what `ledger_errors` says, or LedgerError when closed."""

        def trial() -> T:
            return self._trial(work)

        return self._locking()(trial)

    def _trial(self, work: Callable[[Session], T]) -> T:
        with Session(self._write_engine) as session:
            self._connect(session)
            with ledger_errors(self.engine):
                result = work(session)
                session.flush()
            with ledger_errors(self.engine, committing=True):
                session.commit()
        return result

    def write(self, work: Callable[[Session], T]) -> T:
        """Do `work` and commit it; again after a passing fault that surely left nothing.

        Raises CommitUnknownError at once when the connection was lost over the COMMIT, otherwise as `once`.
        """
        return self._retrying(LedgerAwayError, but=CommitUnknownError)(lambda: self.once(work))

    def settle(self, work: Callable[[Session], None], found: Callable[[Session], bool]) -> None:
        """Do `work` and commit it; again after any passing fault.

        After a COMMIT whose outcome is unknown, `found` is asked in the next transaction, before `work`; it must wait
        for what the lost connection may still be doing on the server (by a row lock that `work` takes too).
        Raises CommitUnknownError when that could not be found out, otherwise as `once`.
        """
        doubtful = False

        def asked(session: Session) -> None:
            if not (doubtful and found(session)):
                work(session)

        def trial() -> None:
            nonlocal doubtful
            try:
                self.once(asked)
            except CommitUnknownError:
                doubtful = True
                raise

        try:
            self._retrying(LedgerAwayError)(trial)
        except LedgerAwayError as error:
            if doubtful and not isinstance(error, CommitUnknownError):
                raise CommitUnknownError(in_doubt(self.engine, f"now: {error}")) from error
            raise

    @contextmanager
    def holding(self, lock: Callable[[Session], object]) -> Iterator[None]:
        """Within, what `lock` has locked stays so; nothing is written. `lock` is tried again after a passing fault.

        Raises what `lock` does, or as `once`.
        """

        def begin(session: Session) -> None:
            session.rollback()
            self._connect(session)
            with ledger_errors(self.engine):
                lock(session)

        with Session(self._write_engine) as session:
            self._retrying(LedgerAwayError)(lambda: self._locking()(begin, session))
            yield

    def _connect(self, session: Session) -> None:
        if self._closed.is_set():
            raise LedgerError(f"ledger {where(self.engine)} was closed. Open it again.")
        with ledger_errors(self.engine):
            session.connection()

    def _retrying(self, passing: type[LedgerError], but: type[LedgerError] | tuple[()] = ()) -> Retrying:
        return Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, passing) and not isinstance(error, but)),
            stop=self._after(self._patience.retry_s),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            sleep=self._pause,
            reraise=True,
        )

    def _locking(self) -> Retrying:
        """For one try at a transaction: it waits for a lock in slices, between which signals are heard."""
        return Retrying(
            retry=retry_if_exception_type(LockedError),
            stop=self._after(self._patience.lock_s),
            reraise=True,
        )

    def _after(self, seconds: float) -> Callable[[RetryCallState], bool]:
        """Stop after so many, or when nothing may be waited for any more."""
        return lambda tried: (tried.seconds_since_start or 0.0) >= seconds or self._patience.seconds_left() <= 0

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := min(end - time.monotonic(), self._patience.seconds_left())) > 0:
            if self._closed.wait(min(left, _LOOK_S)):
                return
