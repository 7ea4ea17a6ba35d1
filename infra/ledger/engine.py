"""Opens the ledger's database: connection settings, migrations, and database errors in plain words.

The only file that knows which database it is. SQLite: write-ahead log, so that a reader never waits for the writer;
a writing transaction takes its lock at BEGIN, because one that reads first and upgrades later fails at once with
"database is locked", whatever the timeout. A WAL database does not work on a network file system.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry

from moonshift.core.errors import LedgerError, StorageError

from .models import LedgerModel

VERSION_TABLE = "alembic_version_ledger"
"""not Alembic's default, which MLflow uses"""

_READ_ONLY = "moonshift_read_only"
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATE_LOCK_S = 120.0
# Any fixed numbers: all Moonshift processes must name the same locks.
_POSTGRES_MIGRATE_KEY = 0x4D4F4F4E
_POSTGRES_NUMBER_KEY = 0x4D4F4F4F
_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_NOT_A_LEDGER = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
_DISK_FAULTS = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
)


def open_engine(url: str, *, busy_timeout_s: float) -> Engine:
    """Engine for `url`; writers wait up to `busy_timeout_s` seconds for SQLite's lock. Makes SQLite's folder.

    Raises LedgerError for a URL or driver that cannot be used, StorageError when the folder cannot be made.
    """
    try:
        parsed = make_url(url)
        # Parameters stay out of errors and logs: a config may hold what is nobody else's business.
        engine = create_engine(parsed, hide_parameters=True, pool_pre_ping=parsed.get_backend_name() != "sqlite")
    except (ArgumentError, NoSuchModuleError) as error:
        raise LedgerError(
            f"ledger URL {_shown(url)} cannot be read: {error}. "
            "Write sqlite:///folder/ledger.db or postgresql+psycopg://user@host/database."
        ) from error
    except ModuleNotFoundError as error:
        raise LedgerError(
            f"ledger URL {_shown(url)} needs the Python package {error.name!r}, which is not installed. "
            "Install it or use sqlite:///folder/ledger.db."
        ) from error
    if engine.dialect.is_async:
        raise LedgerError(f"ledger URL {_shown(url)} names an asynchronous driver. Name a plain one, such as psycopg.")
    if engine.dialect.name == "sqlite":
        _make_folder(parsed)
        _listen_sqlite(engine, busy_timeout_s)
    return engine


def read_only(engine: Engine) -> Engine:
    """The same pool for transactions that only read, and so never wait for a writer."""
    return engine.execution_options(**{_READ_ONLY: True})


def where(engine: Engine) -> str:
    """The database as it may be shown: without its password."""
    return engine.url.render_as_string(hide_password=True)


def migrate(engine: Engine) -> None:
    """Bring the tables to this version's schema; a second call changes nothing.

    Raises LedgerError when the database is locked, is not a ledger, or was written by a newer version.
    """
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    with ledger_errors(engine):
        with read_only(engine).connect() as connection:
            if _is_current(connection, config):
                return
        with _migration_lock(engine), engine.begin() as connection:
            _lock_postgres(connection, _POSTGRES_MIGRATE_KEY)
            if not _is_current(connection, config):  # another process may have done it meanwhile
                _upgrade(connection, config)


def lock_run_numbers(connection: Connection) -> None:
    """Let one transaction at a time give out run numbers; on SQLite every writer is alone anyway."""
    _lock_postgres(connection, _POSTGRES_NUMBER_KEY)


@contextmanager
def ledger_errors(engine: Engine) -> Iterator[None]:
    """Turn what the database raises inside into LedgerError, or StorageError when the disk is at fault."""
    try:
        yield
    except IntegrityError as error:
        raise LedgerError(
            f"ledger {where(engine)} refused a row that is there twice or belongs to nothing ({_reason(error)}). "
            "Nothing of this commit was kept."
        ) from error
    except DBAPIError as error:
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # the low byte is the kind, the rest its detail
        if code in _LOCKED:
            raise LedgerError(
                f"ledger {where(engine)} is locked by another process for longer than the time-out ({error.orig}). "
                "Nothing of this commit was kept; end the process that holds it and try again."
            ) from error
        if code in _NOT_A_LEDGER:
            raise LedgerError(
                f"ledger {where(engine)} is not a readable SQLite database ({error.orig}). "
                "Name another file, or restore this one from a copy."
            ) from error
        if code in _DISK_FAULTS:
            raise StorageError(
                f"ledger file {engine.url.database}: {error.orig}. Check that it is a file, that its folder can be "
                "written to and that the disk has space; then start again. Nothing of this commit was kept."
            ) from error
        raise LedgerError(
            f"ledger {where(engine)} failed ({_reason(error)}). Nothing of this commit was kept."
        ) from error


def _reason(error: DBAPIError) -> str:
    """What the driver said, on one line."""
    return " ".join(str(error.orig).split())


def _shown(url: str) -> str:
    """`url` without what stands between the scheme and the host, which may be a password."""
    scheme, mark, rest = url.partition("://")
    return repr(f"{scheme}{mark}***@{rest.rpartition('@')[2]}" if "@" in rest else url)


def _make_folder(url: URL) -> None:
    path = url.database
    if not path or path == ":memory:" or path.startswith("file:"):
        raise LedgerError(
            f"ledger URL {url.render_as_string()} keeps nothing after the process ends, or is not a plain path. "
            "Write sqlite:///folder/ledger.db."
        )
    folder = Path(path).parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"cannot make the ledger's folder {folder} ({error.strerror}). Choose one that can be written to."
        ) from error


def _listen_sqlite(engine: Engine, busy_timeout_s: float) -> None:
    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # the driver must not begin transactions of its own
        for pragma in (
            f"busy_timeout={int(busy_timeout_s * 1000)}",  # first: the switch to WAL may have to wait
            "journal_mode=WAL",
            "synchronous=NORMAL",
            "foreign_keys=ON",
        ):
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        reads = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")


def _lock_postgres(connection: Connection, key: int) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def _is_current(connection: Connection, config: Config) -> bool:
    """Whether the schema is this version's; refuses one that is newer or not ours."""
    script = ScriptDirectory.from_config(config)
    found = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_heads()
    known = {revision.revision for revision in script.walk_revisions()}
    unknown = sorted(set(found) - known)
    if unknown:
        raise LedgerError(
            f"ledger {where(connection.engine)} has schema {', '.join(unknown)}, this Moonshift knows up to "
            f"{script.get_current_head()}: a newer version wrote it. Install that version or name another ledger."
        )
    if not found:
        foreign = sorted(set(inspect(connection).get_table_names()) & set(LedgerModel.metadata.tables))
        if foreign:
            raise LedgerError(
                f"database {where(connection.engine)} already has tables of these names, and they are not a ledger's: "
                f"{', '.join(foreign)}. Give the ledger a database of its own."
            )
    return set(found) == set(script.get_heads())


def _upgrade(connection: Connection, config: Config) -> None:
    config.attributes["connection"] = connection
    config.attributes["metadata"] = LedgerModel.metadata
    config.attributes["version_table"] = VERSION_TABLE
    command.upgrade(config, "head")


@contextmanager
def _migration_lock(engine: Engine) -> Iterator[None]:
    """One migrating process at a time; Alembic's own state is global, so threads wait here too."""
    if engine.dialect.name != "sqlite":
        yield
        return
    path = f"{engine.url.database}.lock"
    lock = FileLock(path, timeout=_MIGRATE_LOCK_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise LedgerError(
            f"another process has been migrating ledger {where(engine)} for {_MIGRATE_LOCK_S:.0f} s (lock {path}). "
            "End it and try again."
        ) from error
    except OSError as error:
        raise StorageError(f"cannot lock the ledger with {path} ({error}). Make its folder writable.") from error
    try:
        yield
    finally:
        lock.release()
