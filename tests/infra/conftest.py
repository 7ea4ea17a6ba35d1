"""Fixtures of the tests of infra."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonshift.infra.ledger import Ledger

from .small_run import Make, NewLedger, in_home, maker


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An empty ledger, on each kind of database."""
    with Ledger.open(ledger_url) as opened:
        yield opened


@pytest.fixture(params=["sqlite", "postgresql"])
def new_ledger(request: pytest.FixtureRequest) -> NewLedger:
    """Gives URLs of empty ledgers, one a home, of each kind of database."""
    if request.param == "sqlite":
        return in_home
    server = request.getfixturevalue("postgres_server")

    def on_server(_home: Path) -> str:
        return server.url()

    return on_server


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes small runs, whose ledgers lie in their homes."""
    with maker(tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_handler_of_another_test() -> Iterator[None]:
    """Ray leaves a handler of SIGTERM behind that exits: whether there is one would depend on the tests before."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)
