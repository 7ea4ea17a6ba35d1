"""What the database raises, in the ledger's own errors and in plain words.

Invariant: an error that says nothing of a commit was kept is right. Where the connection was lost while a commit was
on its way, nobody knows until the database is asked again, and the error is a CommitUnknownError.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from moonshift.core.errors import CommitUnknownError, LedgerAwayError, LedgerError, StorageError


class LockedError(LedgerAwayError):
    """Another process held a lock for as long as one try waits: nothing was done, and the next try may get it."""


_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NOT_A_LEDGER = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_DISK_FAULTS = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)

# PostgreSQL's SQLSTATEs: https://www.postgresql.org/docs/current/errcodes-appendix.html
_DISK_FULL = "53100"
_LOCK_NOT_AVAILABLE = "55P03"
_PASSING = (
    "40001",  # serialization_failure
    "40P01",  # deadlock_detected
    "53300",  # too_many_connections
    "57P03",  # cannot_connect_now: the server starts or stops
)
_SHOWN_QUERY = ("host", "port")  # any other parameter of a URL may be a password

KEPT_NOTHING = "Nothing of this commit was kept"


def where(engine: Engine) -> str:
    """The database as it may be shown: without its password."""
    url = engine.url
    shown = url.set(query={key: value for key, value in url.query.items() if key in _SHOWN_QUERY})
    return shown.render_as_string(hide_password=True)


@contextmanager
def ledger_errors(engine: Engine, *, committing: bool = False) -> Iterator[None]:
    """Turn what the database raises inside into an error of the ledger.

    Args:
        committing: whether nothing but COMMIT is sent inside.

    Raises:
        StorageError: the disk is at fault.
        CommitUnknownError: the connection was lost over the COMMIT.
        LockedError: locked for longer than this connection waits.
        LedgerAwayError: not to be reached: it may pass.
        LedgerError: everything else.
    """
    try:
        yield
    except IntegrityError as error:
        raise LedgerError(
            f"ledger {where(engine)} refused a row that is there twice or belongs to nothing ({_reason(error)}). "
            f"{KEPT_NOTHING}."
        ) from error
    except DBAPIError as error:
        if committing and error.connection_invalidated:
            raise CommitUnknownError(in_doubt(engine, _reason(error))) from error
        raise _told(engine, error) from error


def in_doubt(engine: Engine, reason: str) -> str:
    """What there is to say of a commit whose outcome nobody knows."""
    return (
        f"ledger {where(engine)} was lost while a commit was on its way ({reason}): whether it was kept is not "
        "known. Start again once the server answers: what is there is not done twice."
    )


def _told(engine: Engine, error: DBAPIError) -> LedgerError | StorageError:
    if engine.dialect.name == "sqlite":
        told = _told_sqlite(engine, error)
    elif _never_connected(error):
        told = _told_connection(engine, _reason(error))
    else:
        told = _told_server(engine, error)
    return told or LedgerError(f"ledger {where(engine)} failed ({_reason(error)}). {KEPT_NOTHING}.")


def _told_sqlite(engine: Engine, error: DBAPIError) -> LedgerError | StorageError | None:
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind, the rest its detail
    if code in _LOCKED:
        return _locked(engine, error)
    if code in _NOT_A_LEDGER:
        return LedgerError(
            f"ledger {where(engine)} is not a readable SQLite database ({error.orig}). "
            "Name another file, or restore this one from a copy."
        )
    if code in _DISK_FAULTS:
        return StorageError(
            f"ledger file {engine.url.database}: {error.orig}. Check that it is a file, that its folder can be "
            f"written to and that the disk has space; then start again. {KEPT_NOTHING}."
        )
    return None


def _told_connection(engine: Engine, reason: str) -> LedgerError:
    """Why there is no connection: the driver has no code for it, only the server's words."""
    if "password" in reason:
        return LedgerError(
            f"ledger {where(engine)} refused the log-in ({reason}). Put the right user and password into the ledger's "
            "URL, or the password into PGPASSWORD or ~/.pgpass."
        )
    if f'database "{engine.url.database}" does not exist' in reason:
        return LedgerError(
            f"ledger {where(engine)}: its server has no database {engine.url.database!r} ({reason}). "
            f"Make it, such as with `createdb {engine.url.database}`, or name another one."
        )
    return LedgerAwayError(
        f"ledger {where(engine)} cannot be reached ({reason}). Check host and port in the ledger's URL and that the "
        f"server runs; then start again. {KEPT_NOTHING}."
    )


def _told_server(engine: Engine, error: DBAPIError) -> LedgerError | StorageError | None:
    state = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated:
        return LedgerAwayError(
            f"the connection to ledger {where(engine)} was lost ({_reason(error)}). Check that its server runs; then "
            f"start again. {KEPT_NOTHING}."
        )
    if state == _LOCK_NOT_AVAILABLE:
        return _locked(engine, error)
    if state in _PASSING:
        return LedgerAwayError(
            f"ledger {where(engine)} is too busy ({_reason(error)}). Start again later. {KEPT_NOTHING}."
        )
    if state == _DISK_FULL:
        return StorageError(
            f"the disk of ledger {where(engine)}'s server is full ({_reason(error)}). Make space there and start "
            f"again. {KEPT_NOTHING}."
        )
    return None


def _locked(engine: Engine, error: DBAPIError) -> LockedError:
    return LockedError(
        f"ledger {where(engine)} is locked by another process for longer than the time-out ({_reason(error)}). "
        f"{KEPT_NOTHING}; end the process that holds it and try again."
    )


def _never_connected(error: DBAPIError) -> bool:
    """Whether the error is one of connecting: it has no statement, and there was no connection to be lost."""
    no_code = getattr(error.orig, "sqlstate", None) is None
    return no_code and error.statement is None and not error.connection_invalidated


def _reason(error: DBAPIError) -> str:
    """What the driver said, on one line."""
    return " ".join(str(error.orig).split())
