"""A ledger is made, brought up to date, or refused with the reason; no message shows a password."""

import socket
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, select, text
from sqlalchemy.orm import Session

from moonshift.core.errors import LedgerAwayError, LedgerError, StorageError
from moonshift.infra.ledger import Ledger
from moonshift.infra.ledger.engine import VERSION_TABLE, migrate, open_engine
from moonshift.infra.ledger.faults import ledger_errors
from moonshift.infra.ledger.models import LedgerModel, RunRow, StageRow

from ..postgres import PostgresServer
from .ledger_rows import owned


def test_upgrading_twice_changes_nothing_and_models_and_migrations_agree(ledger_url: str, ledger: Ledger) -> None:
    lease = owned(ledger)
    engine = open_engine(ledger_url, busy_timeout_s=5)
    before = schema(engine)
    migrate(engine)
    migrate(engine)
    assert schema(engine) == before and set(before) == {*LedgerModel.metadata.tables, VERSION_TABLE}
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, LedgerModel.metadata) == []
    with Session(engine) as session:
        assert session.scalars(select(RunRow.id)).all() == [lease.run_id]
        assert session.scalars(select(StageRow)).all() == []
    engine.dispose()


def schema(engine: Engine) -> dict[str, str]:
    """Columns, keys and indexes of every table, in words."""
    found = inspect(engine)
    return {
        table: repr(
            (
                found.get_columns(table),
                found.get_pk_constraint(table),
                found.get_foreign_keys(table),
                found.get_unique_constraints(table),
                found.get_indexes(table),
            )
        )
        for table in found.get_table_names()
    }


def test_a_newer_or_a_foreign_database_is_refused(ledger_url: str, ledger: Ledger) -> None:
    engine = create_engine(ledger_url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
    with pytest.raises(LedgerError, match=r"schema 9999.* newer version wrote it"):
        Ledger.open(ledger_url)
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {VERSION_TABLE}"))
    with pytest.raises(LedgerError, match=r"not a ledger's: .*runs"):
        Ledger.open(ledger_url)
    engine.dispose()


def test_a_ledger_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("these are not the tables you are looking for\n" * 50)
    with pytest.raises(LedgerError, match=r"notes.txt is not a readable SQLite database"):
        Ledger.open(f"sqlite:///{tmp_path / 'notes.txt'}")
    with pytest.raises(StorageError, match="cannot make the ledger's folder"):
        Ledger.open(f"sqlite:///{tmp_path / 'notes.txt' / 'below' / 'ledger.db'}")
    with pytest.raises(StorageError, match="Check that it is a file"):
        Ledger.open(f"sqlite:///{tmp_path}")
    for url in ("ledger.db", "sqlite://", "sqlite:///:memory:", "nosuch://host/database", "mysql://h/d"):
        with pytest.raises(LedgerError, match=r"sqlite:///folder/ledger.db"):
            Ledger.open(url)
    with pytest.raises(LedgerError, match="asynchronous driver") as caught:
        Ledger.open("postgresql+asyncpg://user:S3CRET@host/database")
    assert "S3CRET" not in str(caught.value)


def test_a_closed_ledger_refuses(ledger: Ledger) -> None:
    ledger.close()
    with pytest.raises(LedgerError, match="was closed"):
        ledger.runs()


def test_a_server_that_cannot_be_used_says_why_without_the_password(postgres_server: PostgresServer) -> None:
    server = postgres_server
    with socket.socket() as unused:  # bound, and nobody listens
        unused.bind(("127.0.0.1", 0))
        away = server.url("none", password="S3CRET", port=unused.getsockname()[1])
        cases: dict[str, tuple[type[LedgerError], str]] = {
            away: (LedgerAwayError, "cannot be reached .*refused.* Check host and port"),
            server.url("none"): (LedgerError, "has no database 'none' .*createdb none"),
            server.url("postgres", password="S3CRET"): (LedgerError, "refused the log-in .*PGPASSWORD"),
            server.url("postgres", user="nobody", password="S3CRET"): (LedgerError, "refused the log-in .*nobody"),
            f"postgresql+psycopg://127.0.0.1:{server.port}/none?user=moonshift&password=S3CRET": (
                LedgerError,
                "refused the log-in",
            ),
            "postgresql+psycopg://u:S3CRET@host:port/x?password=S3CRET": (LedgerError, "is not a number"),
            "postgresql+psycopg://u:word@a:S3CRET@host/x": (LedgerError, "not written as %40"),
        }
        for url, (kind, words) in cases.items():
            with pytest.raises(LedgerError, match=words) as caught:
                Ledger.open(url)
            assert type(caught.value) is kind
            assert "S3CRET" not in str(caught.value) and server.password not in str(caught.value)


def test_a_user_who_may_not_make_tables_is_told_so(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE USER reader PASSWORD 'pw'"))
    engine.dispose()
    with pytest.raises(LedgerError, match="permission denied for schema public"):
        Ledger.open(postgres_server.url(str(engine.url.database), user="reader", password="pw"))


def test_a_transaction_of_a_stopped_process_does_not_hold_the_others_for_ever(postgres_server: PostgresServer) -> None:
    url = postgres_server.url()
    with Ledger.open(url, busy_timeout_s=20) as ledger:
        lease = owned(ledger)
        engine = open_engine(url, busy_timeout_s=0.5)
        with engine.connect() as stopped:
            stopped.execute(text("SELECT * FROM leases FOR UPDATE"))
            ledger.heartbeat(lease, 60)  # at once, it does not try twice
            with pytest.raises(LedgerAwayError, match="was lost"), ledger_errors(engine):
                stopped.execute(text("SELECT 1"))
        engine.dispose()
