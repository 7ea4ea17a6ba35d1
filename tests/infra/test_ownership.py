"""A flow run that is started again has the run that it had, and waits for the lease of its former process alone."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from moonshift.core.config import load_config
from moonshift.core.errors import LeaseHeldError
from moonshift.infra.heartbeat import heartbeat
from moonshift.infra.ledger import AttemptState, Ledger, RunState
from moonshift.infra.ownership import find_or_create, take

from .ledger_rows import new_run
from .small_run import SETTINGS


def prepared() -> Any:
    config = load_config(None, (), environ={}, code=SETTINGS | {"run.name": "nightly"}).config
    return SimpleNamespace(config=config, plan=SimpleNamespace(steps=4))


def test_a_flow_run_goes_on_with_its_own_run_whatever_was_made_since(ledger: Ledger) -> None:
    def found(flow_run_id: str | None, *, resume: bool) -> str:
        return find_or_create(ledger, prepared(), resume, flow_run_id).run_id

    first = found("flow-1", resume=True)
    lease = ledger.acquire(first, lease_s=60, flow_run_id="flow-1")
    assert found("flow-2", resume=False) == "nightly-0002"
    assert found("flow-1", resume=False) == found("flow-1", resume=True) == first == "nightly-0001"
    ledger.release(lease, RunState.FAILED)
    assert found("flow-1", resume=True) == first
    assert found("flow-3", resume=True) == found(None, resume=True) == "nightly-0002"
    assert found(None, resume=False) == "nightly-0003"


def test_a_flow_run_waits_for_the_lease_of_its_dead_process_and_for_no_other(ledger: Ledger) -> None:
    run = ledger.create_run(new_run()).run_id
    dead = ledger.acquire(run, lease_s=2, flow_run_id="flow")  # this process lives, so only time can tell
    began_at = time.monotonic()
    for other in ("another", None):
        with pytest.raises(LeaseHeldError):
            take(ledger, run, 60, other)
    assert time.monotonic() - began_at < 1
    lease = take(ledger, run, 60, "flow")
    assert time.monotonic() - began_at > 2
    assert lease.token == dead.token + 1
    assert [attempt.state for attempt in ledger.attempts(run)] == [AttemptState.CRASHED, AttemptState.RUNNING]


def test_a_process_that_lives_keeps_its_run(ledger: Ledger) -> None:
    run = ledger.create_run(new_run()).run_id
    lease = ledger.acquire(run, lease_s=1.5, flow_run_id="flow")
    with heartbeat(ledger, lease, 1.5), pytest.raises(LeaseHeldError):
        take(ledger, run, 60, "flow")
    ledger.release(lease, RunState.FAILED)
