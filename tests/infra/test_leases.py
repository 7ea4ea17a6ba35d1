"""Who owns a run, with real processes that are killed, on each kind of database."""

import json
import pickle
import socket
import time
from threading import Thread

import pytest
from sqlalchemy.orm import Session

from moonshift.core.errors import LeaseHeldError, LeaseLostError, LedgerError
from moonshift.infra.ledger import AttemptState, CheckpointRecord, Lease, Ledger, RunState
from moonshift.infra.ledger.engine import open_engine
from moonshift.infra.ledger.models import LeaseRow

from .ledger_rows import first_line, killed, new_run, owned, sample, stage, started

OWNER = """
import json, sys, time
from dataclasses import asdict
from moonshift.infra.ledger import Ledger
lease = Ledger.open(sys.argv[1]).acquire(sys.argv[2], lease_s=3600)
print(json.dumps(asdict(lease)), flush=True)
time.sleep(300)
"""


@pytest.mark.case("O03")
def test_of_two_that_want_a_run_at_once_one_gets_it(ledger: Ledger) -> None:
    run_id = ledger.create_run(new_run()).run_id
    leases: list[Lease] = []
    refusals: list[LeaseHeldError] = []

    def take() -> None:
        try:
            leases.append(ledger.acquire(run_id, lease_s=60))
        except LeaseHeldError as error:
            refusals.append(error)

    threads = [Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(leases) == 1 and len(refusals) == 3
    assert socket.gethostname() in str(refusals[0]) and "stop that process" in str(refusals[0])
    assert str(pickle.loads(pickle.dumps(refusals[0]))) == str(refusals[0])
    assert [attempt.state for attempt in ledger.attempts(run_id)] == [AttemptState.RUNNING]


def test_nobody_takes_a_run_over_while_its_owner_holds_it_and_an_old_owner_cannot_hold_it(
    ledger_url: str, ledger: Ledger
) -> None:
    run_id = ledger.create_run(new_run()).run_id
    old = ledger.acquire(run_id, lease_s=60)
    taken: list[float] = []

    def take_over() -> None:
        with Ledger.open(ledger_url) as other:
            other.acquire(run_id, lease_s=60)
            taken.append(time.monotonic())

    ledger.heartbeat(old, -1)
    thread = Thread(target=take_over)
    with ledger.owned(old):
        thread.start()
        time.sleep(0.5)
        left = time.monotonic()
        assert not taken
    thread.join(30)
    assert taken[0] > left
    with pytest.raises(LeaseLostError, match="another attempt took over"), ledger.owned(old):
        raise AssertionError("an old owner got in")


def test_a_run_is_taken_over_from_a_killed_process_and_the_zombie_is_fenced(ledger_url: str, ledger: Ledger) -> None:
    run_id = ledger.create_run(new_run()).run_id
    process = started(OWNER, ledger_url, run_id)
    try:
        zombie = Lease(**json.loads(first_line(process)))
        with pytest.raises(LeaseHeldError, match=f"process {process.pid} on .* since 20"):
            ledger.acquire(run_id, lease_s=60)
    finally:
        killed(process)
    lease = ledger.acquire(run_id, lease_s=60, flow_run_id="flow", resume_step=3)
    assert (lease.token, lease.attempt_number) == (zombie.token + 1, 2)
    first, second = ledger.attempts(run_id)
    assert first.state is AttemptState.CRASHED and str(process.pid) in str(first.error) and first.ended_at is not None
    assert (second.state, second.resume_step, second.flow_run_id) == (AttemptState.RUNNING, 3, "flow")
    checkpoint = CheckpointRecord(step=1, path="", manifest_sha256="", bytes=0)
    for write in (
        lambda: ledger.commit_stage(zombie, stage(metrics={"a": 1.0}, samples=(sample(),))),
        lambda: ledger.commit_step(zombie, 1, 1),
        lambda: ledger.heartbeat(zombie, 60),
        lambda: ledger.release(zombie, RunState.FAILED),
        lambda: ledger.set_run_state(zombie, RunState.FAILED),
        lambda: ledger.set_mlflow_run_id(zombie, "x"),
        lambda: ledger.record_checkpoint(zombie, checkpoint),
        lambda: ledger.mark_checkpoint_deleted(zombie, 1),
    ):
        with pytest.raises(LeaseLostError, match="another attempt took over"):
            write()
    assert ledger.stages(run_id) == [] and ledger.count_pending(run_id) == 0 and ledger.last_step(run_id) == 0
    assert ledger.run(run_id).state is RunState.RUNNING
    ledger.commit_stage(lease, stage())


def test_a_lease_ends_by_time_unless_it_is_renewed(ledger: Ledger) -> None:
    lease = owned(ledger)
    ledger.heartbeat(lease, -1.0)
    ledger.commit_stage(lease, stage())  # late, but nobody has taken over
    ledger.heartbeat(lease, 60)
    with pytest.raises(LeaseHeldError):
        ledger.acquire(lease.run_id, lease_s=60)
    ledger.heartbeat(lease, -1.0)
    assert ledger.acquire(lease.run_id, lease_s=60).token == lease.token + 1
    with pytest.raises(LeaseLostError, match="lost its lease"):
        ledger.heartbeat(lease, 60)


def test_nothing_is_assumed_of_a_process_on_another_host_or_of_a_reused_pid(ledger_url: str, ledger: Ledger) -> None:
    lease = owned(ledger)
    engine = open_engine(ledger_url, busy_timeout_s=5)
    with Session(engine) as session, session.begin():
        row = session.get_one(LeaseRow, lease.run_id)
        row.owner = {"host": "elsewhere", "pid": 2**22 + 1, "pid_started": 0.0, "since": time.time()}
    with pytest.raises(LeaseHeldError, match="on elsewhere"):
        ledger.acquire(lease.run_id, lease_s=60)
    with Session(engine) as session, session.begin():
        row = session.get_one(LeaseRow, lease.run_id)
        row.owner = {**(row.owner or {}), "host": socket.gethostname(), "pid": 1, "pid_started": 1.0}
    engine.dispose()
    assert ledger.acquire(lease.run_id, lease_s=60).attempt_number == 2


def test_a_released_lease_writes_no_more_and_can_be_taken_at_once(ledger: Ledger) -> None:
    lease = owned(ledger)
    with pytest.raises(LedgerError, match="cannot end as RUNNING"):
        ledger.release(lease, RunState.RUNNING)
    ledger.set_mlflow_run_id(lease, "ml")
    ledger.release(lease, RunState.PREEMPTED, "SIGTERM")
    with pytest.raises(LeaseLostError, match="given its lease back"):
        ledger.commit_stage(lease, stage())
    with pytest.raises(LeaseLostError, match="given its lease back"):
        ledger.release(lease, RunState.FAILED)
    run, (attempt,) = ledger.run(lease.run_id), ledger.attempts(lease.run_id)
    assert (run.state, run.mlflow_run_id) == (RunState.PREEMPTED, "ml")
    assert (attempt.state, attempt.error) == (AttemptState.PREEMPTED, "SIGTERM")
    second = ledger.acquire(lease.run_id, lease_s=60)
    assert second.attempt_number == 2
    assert ledger.run(lease.run_id).state is RunState.RUNNING
    ledger.release(second, RunState.FAILED, "what no text column holds: \0 \udcff")
    assert ledger.attempts(lease.run_id)[1].error == r"what no text column holds: \x00 \udcff"
