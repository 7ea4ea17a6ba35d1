"""A ledger that is locked or away, and writers that are killed: nothing lost, nothing half, nothing twice."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moonshift.core.errors import LedgerAwayError
from moonshift.infra.ledger import Ledger

from .ledger_rows import first_line, killed, locked_by_another, owned, sample, stage, started

UNFINISHED = """
import sys, time
from sqlalchemy.orm import Session
from moonshift.infra.ledger.engine import open_engine
from moonshift.infra.ledger.models import StageRow
with Session(open_engine(sys.argv[1], busy_timeout_s=5)) as session:
    session.add(StageRow(run_id=sys.argv[2], step=1, name="update", attempt_id=1, input_digest="", path="", digest="",
                         seconds=0.0, metrics={}, committed_at=0.0))
    session.flush()
    print("written", flush=True)
    time.sleep(300)
"""
WRITER = """
import sys
from moonshift.infra.ledger import Ledger, NewRun
ledger = Ledger.open(sys.argv[1])
run = ledger.create_run(NewRun(name="writer", config_json="{}", config_hash="h", seed=0, steps_planned=1))
print(run.run_id, flush=True)
sys.stdin.readline()
for index in range(200):
    ledger.event(run.run_id, "insert", {"index": index})
"""


def test_an_unfinished_transaction_of_a_killed_process_leaves_nothing(ledger_url: str, ledger: Ledger) -> None:
    lease = owned(ledger)
    process = started(UNFINISHED, ledger_url, lease.run_id)
    try:
        assert first_line(process) == "written"
        assert ledger.stages(lease.run_id) == []  # a reader does not wait for the writer
    finally:
        killed(process)
    assert ledger.stages(lease.run_id) == []
    ledger.commit_stage(lease, stage())


@pytest.mark.case("O05")
def test_eight_writers_lose_and_double_nothing_behind_a_lock_of_one_second(ledger_url: str) -> None:
    writers = [started(WRITER, ledger_url) for _ in range(8)]  # they also race to make the tables and number their runs
    try:
        run_ids = [first_line(writer) for writer in writers]
        assert sorted(run_ids) == [f"writer-{number:04d}" for number in range(1, 9)]
        with locked_by_another(ledger_url):
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write("go\n")
                writer.stdin.flush()
            time.sleep(1.0)
        assert [writer.wait(120) for writer in writers] == [0] * 8
    finally:
        for writer in writers:
            killed(writer)
    with Ledger.open(ledger_url) as ledger:
        for run_id in run_ids:
            assert [event.detail["index"] for event in ledger.events(run_id)] == list(range(200))


@pytest.mark.case("O05")
def test_a_lock_longer_than_the_time_out_is_one_clear_error_and_no_half_transaction(ledger_url: str) -> None:
    with Ledger.open(ledger_url, busy_timeout_s=0.2, retry_s=0) as ledger:
        lease = owned(ledger)
        with locked_by_another(ledger_url):
            with pytest.raises(LedgerAwayError, match=r"locked by another process .* Nothing of this commit was kept"):
                ledger.commit_stage(lease, stage(metrics={"a": 1.0}, samples=(sample(),)))
            assert ledger.stages(lease.run_id) == [] and ledger.samples(lease.run_id, 1) == []
        ledger.commit_stage(lease, stage(metrics={"a": 1.0}, samples=(sample(),)))
        assert ledger.count_pending(lease.run_id) == 1


@pytest.mark.slow
@pytest.mark.case("O05")
def test_a_lock_of_30_s_is_an_error_to_the_impatient_and_a_delay_to_the_patient(ledger_url: str) -> None:
    with (
        Ledger.open(ledger_url, busy_timeout_s=0.5, retry_s=3) as impatient,
        Ledger.open(ledger_url, busy_timeout_s=2) as patient,
        ThreadPoolExecutor(1) as pool,
    ):
        lease = owned(patient)
        with locked_by_another(ledger_url):
            began = time.monotonic()
            waiting = pool.submit(patient.commit_stage, lease, stage(metrics={"a": 1.0}, samples=(sample(),)))
            tries = 0
            while time.monotonic() < began + 30:
                tried = time.monotonic()
                with pytest.raises(LedgerAwayError, match="locked by another process"):
                    impatient.commit_stage(lease, stage(2, metrics={"a": 1.0}))
                assert 3 <= time.monotonic() - tried < 15
                tries += 1
            assert tries >= 2 and not waiting.done()
        waiting.result(60)
        assert [(record.step, record.metrics) for record in patient.stages(lease.run_id)] == [(1, {"a": 1.0})]
        assert len(patient.samples(lease.run_id, 1)) == patient.count_pending(lease.run_id) == 1
