"""The ledger on real SQLite files, with real processes that are killed."""

import json
import math
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session
from sqlalchemy.schema import CreateTable

from moonshift.core.errors import LeaseHeldError, LedgerError, StorageError
from moonshift.infra.ledger import (
    AttemptState,
    CheckpointRecord,
    CheckpointState,
    Lease,
    Ledger,
    MetricPoint,
    NewRun,
    RunState,
    SampleRow,
    StageCommit,
)
from moonshift.infra.ledger.engine import VERSION_TABLE, migrate, open_engine
from moonshift.infra.ledger.models import LeaseRow, LedgerModel, RunRow, StageRow

OWNER = """
import json, sys, time
from dataclasses import asdict
from moonshift.infra.ledger import Ledger
lease = Ledger.open(sys.argv[1]).acquire(sys.argv[2], lease_s=3600)
print(json.dumps(asdict(lease)), flush=True)
time.sleep(300)
"""
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


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'state' / 'ledger.db'}"


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    with Ledger.open(url) as opened:
        yield opened


def new_run(name: str = "nightly", *, steps: int = 2, run_id: str | None = None) -> NewRun:
    return NewRun(name=name, config_json="{}", config_hash="h", seed=7, steps_planned=steps, run_id=run_id)


def owned(ledger: Ledger, *, steps: int = 2) -> Lease:
    return ledger.acquire(ledger.create_run(new_run(steps=steps)).run_id, lease_s=60)


def stage(
    step: int = 1,
    name: str = "update",
    metrics: dict[str, float] | None = None,
    samples: tuple[SampleRow, ...] = (),
) -> StageCommit:
    return StageCommit(
        step=step,
        name=name,
        input_digest="in",
        path=f"steps/{step}/{name}",
        digest="out",
        seconds=0.5,
        metrics=metrics or {},
        samples=samples,
    )


def sample(uid: str = "train.jsonl:1", index: int = 0, reward: float | None = 1.0) -> SampleRow:
    return SampleRow(epoch=0, uid=uid, sample_index=index, reward=reward, response_tokens=5, finish_reason="stop")


def started(script: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def killed(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def test_runs_are_numbered_by_name_and_found_again(url: str, ledger: Ledger) -> None:
    first, second = ledger.create_run(new_run()), ledger.create_run(new_run())
    other = ledger.create_run(new_run("nightly-x"))
    explicit = ledger.create_run(new_run("nightly", run_id="nightly-0041"))
    assert [first.run_id, second.run_id, other.run_id] == ["nightly-0001", "nightly-0002", "nightly-x-0001"]
    assert ledger.create_run(new_run()).run_id == "nightly-0042"
    assert first.state is RunState.CREATED and abs(first.t0_ms - time.time() * 1000) < 60_000
    with Ledger.open(url) as again:
        assert again.run(explicit.run_id) == explicit
        assert len(again.runs()) == 5


def test_a_taken_id_and_an_unknown_run_are_refused(ledger: Ledger) -> None:
    ledger.create_run(new_run(run_id="one"))
    with pytest.raises(LedgerError, match="'one' is already in ledger"):
        ledger.create_run(new_run(run_id="one"))
    with pytest.raises(LedgerError, match=r"'two' is not in ledger .* newest runs: one"):
        ledger.run("two")
    with pytest.raises(LedgerError, match="'two'"):
        ledger.event("two", "x", {})
    with pytest.raises(LedgerError, match=r"2\^63"):
        ledger.create_run(NewRun(name="a", config_json="", config_hash="", seed=2**63, steps_planned=1))


@pytest.mark.case("S02")
@pytest.mark.parametrize(
    "name", ["../../etc/x", "/abs", "a/../../b", "con\x00x", "x" * 250, ".", "", "a\n", "..", ".a", "ü"]
)
def test_a_name_that_could_leave_its_folder_is_refused(ledger: Ledger, name: str) -> None:
    with pytest.raises(LedgerError, match="cannot name a folder"):
        ledger.create_run(new_run(name))
    with pytest.raises(LedgerError, match="cannot name a folder"):
        ledger.create_run(new_run("ok-1", run_id=name or "/"))
    assert ledger.create_run(new_run("ok-1")).run_id == "ok-1-0001"


def test_the_latest_unfinished_run_is_found(ledger: Ledger) -> None:
    assert ledger.latest_run("nightly", unfinished=False) is None
    failed, cancelled = owned(ledger), owned(ledger)
    ledger.release(failed, RunState.FAILED, "reward raised")
    ledger.release(cancelled, RunState.CANCELLED)
    newest, unfinished = (ledger.latest_run("nightly", unfinished=flag) for flag in (False, True))
    assert newest is not None and newest.run_id == cancelled.run_id
    assert unfinished is not None and unfinished.run_id == failed.run_id


def test_a_stage_is_committed_whole_and_read_back(ledger: Ledger) -> None:
    lease = owned(ledger)
    commit = stage(metrics={"loss": 0.25, "kl": math.inf}, samples=(sample(index=1, reward=None), sample(index=0)))
    ledger.commit_stage(lease, commit)
    record = ledger.stage(lease.run_id, 1, "update")
    assert record is not None and ledger.stages(lease.run_id) == [record] == ledger.stages(lease.run_id, 1)
    assert (record.attempt_id, record.digest, record.path) == (lease.attempt_id, "out", "steps/1/update")
    assert record.metrics == {"loss": 0.25, "kl": math.inf}
    assert ledger.samples(lease.run_id, 1) == [sample(index=0), sample(index=1, reward=None)]
    assert ledger.stage(lease.run_id, 2, "update") is None and ledger.stages(lease.run_id, 2) == []


def test_a_stage_is_never_committed_twice(ledger: Ledger) -> None:
    lease = owned(ledger)
    ledger.commit_stage(lease, stage(metrics={"a": 1.0}))
    with pytest.raises(LedgerError, match=r"'update' of step 1 .* committed already"):
        ledger.commit_stage(lease, stage(metrics={"b": 1.0}))
    with pytest.raises(LedgerError, match="another stage of this step has reported: a"):
        ledger.commit_stage(lease, stage(name="score", metrics={"a": 2.0}))
    assert [record.name for record in ledger.stages(lease.run_id)] == ["update"]
    assert ledger.metric_series(lease.run_id, "a") == [(1, 1.0)] and ledger.metric_series(lease.run_id, "b") == []


def test_a_commit_with_one_bad_row_leaves_nothing(ledger: Ledger) -> None:
    lease = owned(ledger)
    with pytest.raises(LedgerError, match="there twice"):
        ledger.commit_stage(lease, stage(metrics={"a": 1.0}, samples=(sample(), sample(reward=0.0))))
    assert ledger.stages(lease.run_id) == [] and ledger.samples(lease.run_id, 1) == []
    assert ledger.count_pending(lease.run_id) == 0
    ledger.commit_stage(lease, stage(metrics={"a": 1.0}, samples=(sample(),)))
    assert ledger.count_pending(lease.run_id) == 1


def test_the_last_step_is_the_last_without_a_gap(ledger: Ledger) -> None:
    lease = owned(ledger)
    assert ledger.last_step(lease.run_id) == 0
    for step in (1, 2, 4):
        ledger.commit_step(lease, step, policy_version=step)
    assert ledger.last_step(lease.run_id) == 2
    with pytest.raises(LedgerError, match=r"step 2 .* committed already"):
        ledger.commit_step(lease, 2, 2)
    with pytest.raises(LedgerError, match="counted from 1"):
        ledger.commit_step(lease, 0, 0)


def test_a_run_with_fewer_steps_than_planned_is_never_completed(ledger: Ledger) -> None:
    lease = owned(ledger, steps=2)
    ledger.commit_step(lease, 1, 1)
    with pytest.raises(LedgerError, match="1 of its 2 planned steps"):
        ledger.release(lease, RunState.COMPLETED)
    ledger.heartbeat(lease, 60)  # the refused release gave nothing back
    ledger.commit_step(lease, 2, 2)
    ledger.release(lease, RunState.COMPLETED)
    assert ledger.run(lease.run_id).state is RunState.COMPLETED
    assert [attempt.state for attempt in ledger.attempts(lease.run_id)] == [AttemptState.COMPLETED]


def test_checkpoints_and_events_are_kept(ledger: Ledger) -> None:
    lease = owned(ledger)
    for step in (4, 2):
        ledger.record_checkpoint(lease, CheckpointRecord(step=step, path=f"v{step}", manifest_sha256="ab", bytes=2**40))
    ledger.mark_checkpoint_deleted(lease, 2)
    ledger.record_checkpoint(lease, CheckpointRecord(step=4, path="v4", manifest_sha256="cd", bytes=1))
    found = ledger.checkpoints(lease.run_id)
    assert [(item.step, item.state) for item in found] == [(2, CheckpointState.DELETED), (4, CheckpointState.KEPT)]
    assert (found[0].bytes, found[1].manifest_sha256) == (2**40, "cd")
    with pytest.raises(LedgerError, match="no checkpoint of step 3"):
        ledger.mark_checkpoint_deleted(lease, 3)
    ledger.event(lease.run_id, "skipped", {"loss": math.nan, "steps": (1, 2)}, lease.attempt_id)
    assert [(event.kind, event.detail) for event in ledger.events(lease.run_id)] == [
        ("skipped", {"loss": "nan", "steps": [1, 2]})
    ]


@pytest.mark.case("K10")
def test_each_metric_of_each_step_is_sent_once_and_in_order_over_a_crash(ledger: Ledger) -> None:
    lease = owned(ledger, steps=8)
    for step in range(1, 7):
        ledger.commit_stage(lease, stage(step, metrics={"loss": 1 / step, "reward": float(step)}))
        ledger.commit_step(lease, step, step)
    ledger.mark_sent([point.id for point in ledger.pending_metrics(lease.run_id, limit=7)])
    ledger.release(lease, RunState.FAILED, "crash")
    second = ledger.acquire(lease.run_id, lease_s=60, resume_step=4)
    for step in range(5, 9):  # 5 and 6 are replayed: their stages are committed, so they report nothing again
        if ledger.stage(lease.run_id, step, "update") is None:
            ledger.commit_stage(second, stage(step, metrics={"loss": 1 / step, "reward": float(step)}))
            ledger.commit_step(second, step, step)
    assert ledger.metric_series(lease.run_id, "loss") == [(step, 1 / step) for step in range(1, 9)]
    pending = ledger.pending_metrics(lease.run_id)
    assert [(point.step, point.key) for point in pending] == [(4, "reward")] + [
        (step, key) for step in range(5, 9) for key in ("loss", "reward")
    ]
    ledger.mark_sent([point.id for point in pending] * 200)
    assert ledger.count_pending(lease.run_id) == 0 and ledger.last_step(lease.run_id) == 8


@pytest.mark.case("L04")
def test_values_that_are_not_finite_are_kept_but_not_sent_as_numbers(ledger: Ledger) -> None:
    lease = owned(ledger)
    for step, value in enumerate((math.nan, math.inf, -math.inf, 1.0), start=1):
        ledger.commit_stage(lease, stage(step, metrics={"loss": value}))
    assert str(ledger.metric_series(lease.run_id, "loss")) == "[(1, nan), (2, inf), (3, -inf), (4, 1.0)]"
    assert ledger.pending_metrics(lease.run_id) == [
        *(MetricPoint(id=step, key="nonfinite/loss", step=step, value=1.0) for step in (1, 2, 3)),
        MetricPoint(id=4, key="loss", step=4, value=1.0),
    ]
    nan_stage = ledger.stage(lease.run_id, 1, "update")
    assert nan_stage is not None and math.isnan(nan_stage.metrics["loss"])
    ledger.commit_stage(lease, stage(5, samples=(sample(reward=math.nan),)))
    assert ledger.samples(lease.run_id, 5)[0].reward is None


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


def test_a_run_is_taken_over_from_a_killed_process_and_the_zombie_is_fenced(url: str, ledger: Ledger) -> None:
    run_id = ledger.create_run(new_run()).run_id
    process = started(OWNER, url, run_id)
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
        with pytest.raises(LedgerError, match="another attempt took over"):
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
    with pytest.raises(LedgerError, match="lost its lease"):
        ledger.heartbeat(lease, 60)


def test_nothing_is_assumed_of_a_process_on_another_host_or_of_a_reused_pid(url: str, ledger: Ledger) -> None:
    lease = owned(ledger)
    engine = open_engine(url, busy_timeout_s=5)
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
    with pytest.raises(LedgerError, match="given its lease back"):
        ledger.commit_stage(lease, stage())
    with pytest.raises(LedgerError, match="given its lease back"):
        ledger.release(lease, RunState.FAILED)
    run, (attempt,) = ledger.run(lease.run_id), ledger.attempts(lease.run_id)
    assert (run.state, run.mlflow_run_id) == (RunState.PREEMPTED, "ml")
    assert (attempt.state, attempt.error) == (AttemptState.PREEMPTED, "SIGTERM")
    assert ledger.acquire(lease.run_id, lease_s=60).attempt_number == 2
    assert ledger.run(lease.run_id).state is RunState.RUNNING


def test_an_unfinished_transaction_of_a_killed_process_leaves_nothing(url: str, ledger: Ledger) -> None:
    lease = owned(ledger)
    process = started(UNFINISHED, url, lease.run_id)
    try:
        assert first_line(process) == "written"
        assert ledger.stages(lease.run_id) == []  # a reader does not wait for the writer
    finally:
        killed(process)
    assert ledger.stages(lease.run_id) == []
    ledger.commit_stage(lease, stage())


@pytest.mark.case("O05")
def test_eight_writers_lose_and_double_nothing_behind_a_lock_of_one_second(url: str, tmp_path: Path) -> None:
    writers = [started(WRITER, url) for _ in range(8)]  # they also race to make the file and to number their runs
    try:
        run_ids = [first_line(writer) for writer in writers]
        assert sorted(run_ids) == [f"writer-{number:04d}" for number in range(1, 9)]
        lock = sqlite3.connect(tmp_path / "state" / "ledger.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        time.sleep(1.0)
        lock.execute("COMMIT")
        lock.close()
        assert [writer.wait(120) for writer in writers] == [0] * 8
    finally:
        for writer in writers:
            killed(writer)
    with Ledger.open(url) as ledger:
        for run_id in run_ids:
            assert [event.detail["index"] for event in ledger.events(run_id)] == list(range(200))


@pytest.mark.case("O05")
def test_a_lock_longer_than_the_time_out_is_one_clear_error_and_no_half_transaction(url: str, tmp_path: Path) -> None:
    with Ledger.open(url, busy_timeout_s=0.2) as ledger:
        lease = owned(ledger)
        lock = sqlite3.connect(tmp_path / "state" / "ledger.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LedgerError, match="locked by another process"):
            ledger.commit_stage(lease, stage(metrics={"a": 1.0}))
        assert ledger.stages(lease.run_id) == []
        lock.close()
        ledger.commit_stage(lease, stage(metrics={"a": 1.0}))
        assert ledger.count_pending(lease.run_id) == 1


def test_upgrading_twice_changes_nothing_and_models_and_migrations_agree(url: str, ledger: Ledger) -> None:
    lease = owned(ledger)
    engine = open_engine(url, busy_timeout_s=5)
    schema = text("SELECT name, sql FROM sqlite_master ORDER BY name")
    with engine.connect() as connection:
        before = connection.execute(schema).all()
    migrate(engine)
    migrate(engine)
    with engine.connect() as connection:
        assert connection.execute(schema).all() == before
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, LedgerModel.metadata) == []
    with Session(engine) as session:
        assert session.scalars(select(RunRow.id)).all() == [lease.run_id]
        assert session.scalars(select(StageRow)).all() == []
    engine.dispose()


def test_the_tables_can_be_written_for_postgresql() -> None:
    written = "\n".join(
        str(CreateTable(table).compile(dialect=postgresql.dialect())) for table in LedgerModel.metadata.sorted_tables
    )
    assert "id BIGSERIAL" in written and "DOUBLE PRECISION" in written and "step SERIAL" not in written


def test_a_newer_or_a_foreign_database_is_refused(url: str, ledger: Ledger, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "state" / "ledger.db") as connection:
        connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    with pytest.raises(LedgerError, match=r"schema 9999.* newer version wrote it"):
        Ledger.open(url)
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE runs (run_uuid TEXT)")
    with pytest.raises(LedgerError, match="not a ledger's: runs"):
        Ledger.open(f"sqlite:///{tmp_path / 'other.db'}")


def test_a_ledger_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("these are not the tables you are looking for\n" * 50)
    with pytest.raises(LedgerError, match=r"notes.txt is not a readable SQLite database"):
        Ledger.open(f"sqlite:///{tmp_path / 'notes.txt'}")
    with pytest.raises(StorageError, match="cannot make the ledger's folder"):
        Ledger.open(f"sqlite:///{tmp_path / 'notes.txt' / 'below' / 'ledger.db'}")
    with pytest.raises(StorageError, match="Check that it is a file"):
        Ledger.open(f"sqlite:///{tmp_path}")
    for url in ("ledger.db", "sqlite://", "sqlite:///:memory:", "nosuch://host/database"):
        with pytest.raises(LedgerError, match=r"Write sqlite:///folder/ledger.db"):
            Ledger.open(url)
    with pytest.raises(LedgerError, match="asynchronous driver") as caught:
        Ledger.open("postgresql+asyncpg://user:S3CRET@host/database")
    assert "S3CRET" not in str(caught.value)


def test_a_closed_ledger_refuses(ledger: Ledger) -> None:
    ledger.close()
    with pytest.raises(LedgerError, match="was closed"):
        ledger.runs()


def test_a_sender_thread_reads_while_the_run_writes(ledger: Ledger) -> None:
    lease = owned(ledger)
    sent: list[MetricPoint] = []

    def send() -> None:
        deadline = time.monotonic() + 30
        while len(sent) < 30 and time.monotonic() < deadline:
            points = ledger.pending_metrics(lease.run_id, limit=7)
            sent.extend(points)
            ledger.mark_sent([point.id for point in points])
            time.sleep(0.002)

    sender = Thread(target=send)
    sender.start()
    for step in range(1, 31):
        ledger.commit_stage(lease, stage(step, metrics={"loss": float(step)}))
    sender.join(40)
    assert [(point.step, point.value) for point in sent] == [(step, float(step)) for step in range(1, 31)]
