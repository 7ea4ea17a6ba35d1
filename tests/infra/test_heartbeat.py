"""The lease is renewed over a passing fault of the ledger, and no more once it is lost."""

import logging
import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, text

from moonshift.core.errors import LeaseHeldError
from moonshift.infra.heartbeat import heartbeat
from moonshift.infra.ledger import Lease, Ledger, RunState

from .ledger_rows import locked_by_another, new_run, owned


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether `holds` becomes true in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def expiry(url: str, lease: Lease) -> float:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT expires_at FROM leases WHERE run_id = :id"), {"id": lease.run_id})
        moment = found.scalar_one()
    engine.dispose()
    return moment


def beating() -> bool:
    return any(thread.name == "lease-heartbeat" for thread in threading.enumerate())


def test_a_locked_ledger_delays_the_beat_and_does_not_end_it(ledger_url: str, caplog: pytest.LogCaptureFixture) -> None:
    lease_s = 1.5
    with Ledger.open(ledger_url, busy_timeout_s=0.1) as ledger, caplog.at_level(logging.WARNING):
        lease = ledger.acquire(ledger.create_run(new_run()).run_id, lease_s=lease_s)
        with heartbeat(ledger, lease, lease_s):
            with locked_by_another(ledger_url):
                assert eventually(lambda: caplog.text.count("locked by another process") >= 3), "each beat is a try"
                assert beating()
            unlocked = time.time()
            assert eventually(lambda: expiry(ledger_url, lease) > unlocked + 1)
            with pytest.raises(LeaseHeldError):
                ledger.acquire(lease.run_id, lease_s=60)
        assert not beating()
        ledger.release(lease, RunState.FAILED)


def test_a_lost_lease_ends_the_beat(ledger_url: str, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    lease = owned(ledger)
    with heartbeat(ledger, lease, 0.6), caplog.at_level(logging.WARNING):
        assert eventually(lambda: 0 < expiry(ledger_url, lease) - time.time() < 1), "it beats"
        ledger.release(lease, RunState.PAUSED)
        second = ledger.acquire(lease.run_id, lease_s=3600)
        assert eventually(lambda: not beating())
        assert "renewed no more" in caplog.text
        assert expiry(ledger_url, second) > time.time() + 3000
