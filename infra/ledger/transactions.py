"""Short transactions on one database, repeated where a passing fault broke them and a second time does no harm.

A lock that lasts beyond the time-out, a server that starts again, a lost connection: none of them need end a night's
run. A transaction that surely left nothing is done again. One whose COMMIT was on its way when the connection broke
may have been kept: only work that knows how to find itself (`settle`) is done again after that, and only when it is
not there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session
from tenacity import (
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    wait_random_exponential,
)

from moonshift.core.errors import CommitUnknownError, LedgerAwayError, LedgerError

from .engine import read_only
from .faults import in_doubt, ledger_errors, where

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


def never_found(_session: Session) -> bool:
    """For work that leaves the same when it is done twice: nothing to look for, do it again."""
    return False


class Transactions:
    """Opens a session for each; safe to use from several threads.

    Example: `transactions.write(lambda session: session.add(row))`.
    """

    def __init__(self, engine: Engine, retry_s: float) -> None:
        """`retry_s`: seconds from its begin within which a transaction that failed is begun again; 0: once only."""
        self.engine = engine
        self._read_engine = read_only(engine)
        self._retry_s = retry_s
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
        with Session(self.engine) as session:
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

        with Session(self.engine) as session:
            self._retrying(LedgerAwayError)(begin, session)
            yield

    def _connect(self, session: Session) -> None:
        if self._closed.is_set():
            raise LedgerError(f"ledger {where(self.engine)} was closed. Open it again.")
        with ledger_errors(self.engine):
            session.connection()

    def _retrying(self, passing: type[LedgerError], but: type[LedgerError] | tuple[()] = ()) -> Retrying:
        return Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, passing) and not isinstance(error, but)),
            stop=stop_after_delay(self._retry_s),
            wait=wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            sleep=sleep_using_event(self._closed),
            reraise=True,
        )
