"""Fixtures of the tests of infra."""

from collections.abc import Iterator

import pytest

from moonshift.infra.ledger import Ledger


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    """An empty ledger, on each kind of database."""
    with Ledger.open(ledger_url) as opened:
        yield opened
