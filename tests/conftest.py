"""Fixtures shared by all rooms."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# before any library reads them: no telemetry, no outside look-ups, as the command line sets them
from moonshift.infra.offline import apply_quiet_environment

from .postgres import PostgresServer, programs, running_server

apply_quiet_environment(Path(os.environ.get("MOONSHIFT_HOME", "/tmp")) / "moonshift-tests")


@pytest.fixture
def moonshift_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home of its own for a test."""
    folder = tmp_path / "home"
    monkeypatch.setenv("MOONSHIFT_HOME", str(folder))
    yield folder


@pytest.fixture(scope="session")
def moonshift_command() -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-m", "moonshift.flows.cli"]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running PostgreSQL server, for all tests of the session."""
    binaries = programs()
    if binaries is None:
        pytest.skip("no PostgreSQL server on this machine (initdb, pg_ctl): apt-get install postgresql")
    with running_server(binaries) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty ledger, of each kind of database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'state' / 'ledger.db'}"
    return request.getfixturevalue("postgres_server").url()


@pytest.fixture(scope="session")
def char_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny seeded character-level Llama."""
    from moonshift.core.training.model import resolve_model

    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    cache = tmp_path_factory.mktemp("models")
    return resolve_model("builtin:char-llama", override_config=settings, seed=3, cache=cache)


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a real MLflow server."""
    from moonshift.infra.server_programs import mlflow_program
    from moonshift.infra.services import StandingServer

    home = tmp_path_factory.mktemp("mlflow")
    program = mlflow_program(f"sqlite:///{home / 'mlflow.db'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ARTIFACTS_DESTINATION", str(home / "artifacts"))  # by default the working folder
        with StandingServer(home, program=program) as server:
            yield server.wait_ready().removeprefix("http://")
