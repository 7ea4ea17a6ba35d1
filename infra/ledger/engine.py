"""Opens the ledger's database: connection settings and migrations.

With `faults`, the only file that knows which database it is. SQLite: write-ahead log, so that a reader never waits
for the writer; a writing transaction takes its lock at BEGIN, because one that reads first and upgrades later fails at
once with "database is locked", whatever the timeout. A WAL database does not work on a network file system.

PostgreSQL: no wait is without end, neither for a lock, nor for a server that is gone, nor for a transaction of a
process that was stopped in its middle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from filelock import FileLock, Timeout
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from moonshift.core.errors import LedgerError, StorageError

from .faults import ledger_errors, where
from .models import LedgerModel

VERSION_TABLE = "alembic_version_ledger"
"""not Alembic's default, which MLflow uses"""

_READ_ONLY = "moonshift_read_only"
_IN_SLICES = "moonshift_in_slices"
_SLICE_S = 0.5
_MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATE_LOCK_S = 120.0
# Any fixed numbers: all Moonshift processes must name the same locks.
_POSTGRES_MIGRATE_KEY = 0x4D4F4F4E
_POSTGRES_NUMBER_KEY = 0x4D4F4F4F
_FORMS = "Write sqlite:///folder/ledger.db or postgresql+psycopg://user@host/database."
_LEAST_IDLE_S = 5.0
_CONNECT_TIMEOUT_S = 10
# A server whose host vanished answers nothing: without these a query waits for it for hours. Seconds, then a count.
_KEEPALIVES = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}


def open_engine(url: str, *, busy_timeout_s: float) -> Engine:
    """Engine for `url`; writers wait up to `busy_timeout_s` seconds for a lock. Makes SQLite's folder.

    On PostgreSQL a transaction that does nothing for as long as others would wait for it is ended.

    Raises LedgerError for a URL or driver that cannot be used, StorageError when the folder cannot be made.
    """
    try:
        parsed = make_url(url)
        # Parameters stay out of errors and logs: a config may hold what is nobody else's business.
        engine = create_engine(
            parsed,
            hide_parameters=True,
            pool_pre_ping=parsed.get_backend_name() != "sqlite",
            connect_args=_connect_arguments(parsed),
        )
    except (ArgumentError, NoSuchModuleError) as error:
        raise LedgerError(f"ledger URL {_shown(url)} cannot be read: {error}. {_FORMS}") from error
    except ValueError:  # its words, and the parser's trace, may hold a part of the password
        raise LedgerError(
            f"ledger URL {_shown(url)} has a port that is not a number, or a user or password with an @ that is not "
            f"written as %40. {_FORMS}"
        ) from None
    except ModuleNotFoundError as error:
        raise LedgerError(
            f"ledger URL {_shown(url)} needs the Python package {error.name!r}, which is not installed. "
            "Install moonshift[postgres] or use sqlite:///folder/ledger.db."
        ) from error
    if engine.dialect.is_async:
        raise LedgerError(f"ledger URL {_shown(url)} names an asynchronous driver. Name a plain one, such as psycopg.")
    if engine.dialect.name == "sqlite":
        _make_folder(parsed)
        _listen_sqlite(engine, busy_timeout_s)
    elif engine.dialect.name == "postgresql":
        _listen_postgres(engine, busy_timeout_s)
    else:
        raise LedgerError(f"ledger URL {_shown(url)} names a database that is not supported. {_FORMS}")
    return engine


def read_only(engine: Engine) -> Engine:
    """The same pool for transactions that only read, and so never wait for a writer."""
    return engine.execution_options(**{_READ_ONLY: True})


def in_slices(engine: Engine) -> Engine:
    """The same pool for transactions that wait half a second for a lock, and are begun again by who began them.

    The database's own wait hears nothing of a signal, or of a deadline that was set meanwhile.
    """
    return engine.execution_options(**{_IN_SLICES: True})


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


def insert_new(session: Session, model: type[LedgerModel]) -> Any:
    """An INSERT that leaves a row of the same key as it is; waits for another transaction that is making it."""
    dialect = sqlite if session.get_bind().dialect.name == "sqlite" else postgresql
    return dialect.insert(model).on_conflict_do_nothing()


def _shown(url: str) -> str:
    """`url` without what stands before the host and after the database, which may be a password."""
    scheme, mark, rest = url.partition("?")[0].partition("://")
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
        options = connection.get_execution_options()
        wait_s = min(busy_timeout_s, _SLICE_S) if options.get(_IN_SLICES) else busy_timeout_s
        connection.exec_driver_sql(f"PRAGMA busy_timeout={int(wait_s * 1000)}")
        connection.exec_driver_sql("BEGIN" if options.get(_READ_ONLY) else "BEGIN IMMEDIATE")


def _connect_arguments(url: URL) -> dict[str, int]:
    """What libpq is told beside the URL, which has the last word."""
    if url.get_backend_name() != "postgresql" or url.get_driver_name() not in ("psycopg", "psycopg2"):
        return {}
    wanted = {"connect_timeout": _CONNECT_TIMEOUT_S, **_KEEPALIVES}
    return {key: value for key, value in wanted.items() if key not in url.query}


def _listen_postgres(engine: Engine, busy_timeout_s: float) -> None:
    # a client that works between two statements of a transaction is not lost, however short it waits for locks
    seconds = {
        "lock_timeout": busy_timeout_s,
        "idle_in_transaction_session_timeout": max(busy_timeout_s, _LEAST_IDLE_S),
    }

    @event.listens_for(engine, "connect")
    def set_up(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        for setting, value in seconds.items():
            cursor.execute(f"SET {setting} = {max(1, int(value * 1000))}")  # 0 would mean without end
        cursor.close()
        connection.commit()  # else the first roll-back takes them back

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if connection.get_execution_options().get(_IN_SLICES):
            wait_s = min(busy_timeout_s, _SLICE_S)
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, int(wait_s * 1000))}")


def _lock_postgres(connection: Connection, key: int) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})


def _is_current(connection: Connection, config: Config) -> bool:
    """Whether the schema is this version's; refuses one that is newer or not ours."""
    script = ScriptDirectory.from_config(config)
    # before the version: another process may commit both between two queries, and PostgreSQL shows that
    tables = set(inspect(connection).get_table_names())
    found = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_heads()
    known = {revision.revision for revision in script.walk_revisions()}
    unknown = sorted(set(found) - known)
    if unknown:
        raise LedgerError(
            f"ledger {where(connection.engine)} has schema {', '.join(unknown)}, this Moonshift knows up to "
            f"{script.get_current_head()}: a newer version wrote it. Install that version or name another ledger."
        )
    if not found:
        foreign = sorted(tables & set(LedgerModel.metadata.tables))
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
