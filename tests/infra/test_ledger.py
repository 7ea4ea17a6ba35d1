"""What the ledger keeps, on real databases of each kind."""

import math
import time
from threading import Thread

import pytest

from moonshift.core.errors import LedgerError
from moonshift.infra.ledger import (
    AttemptState,
    CheckpointRecord,
    CheckpointState,
    Ledger,
    MetricPoint,
    NewRun,
    RunState,
)

from .ledger_rows import new_run, owned, sample, stage


def test_runs_are_numbered_by_name_and_found_again(ledger_url: str, ledger: Ledger) -> None:
    first, second = ledger.create_run(new_run()), ledger.create_run(new_run())
    other = ledger.create_run(new_run("nightly-x"))
    explicit = ledger.create_run(new_run("nightly", run_id="nightly-0041"))
    assert [first.run_id, second.run_id, other.run_id] == ["nightly-0001", "nightly-0002", "nightly-x-0001"]
    assert ledger.create_run(new_run()).run_id == "nightly-0042"
    assert first.state is RunState.CREATED and abs(first.t0_ms - time.time() * 1000) < 60_000
    with Ledger.open(ledger_url) as again:
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
