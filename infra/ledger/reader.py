"""Everything that can be asked of the ledger; never waits for a writer, never writes."""

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from moonshift.core.errors import LedgerError

from .faults import where
from .models import AttemptRow, CheckpointRow, EventRow, OutboxRow, RunRow, SampleIndexRow, StageRow, StepRow
from .records import (
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    MetricPoint,
    RunRecord,
    SampleRow,
    StageRecord,
)
from .states import FINISHED_RUN_STATES, AttemptState, CheckpointState, RunState
from .transactions import Transactions

FLOW_SETTLED = "flow_settled"
"""Kind of the event which says that the Prefect server shows an attempt's flow run as the attempt ended."""


class LedgerReader:
    """The questions; safe to ask from any thread, each in a short transaction of its own."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._read = transactions.reading

    def close(self) -> None:
        """Close the pooled connections; a later call on this ledger raises LedgerError."""
        self._transactions.close()

    def run(self, run_id: str) -> RunRecord:
        """One run. Raises LedgerError when there is none of this id."""
        with self._read() as session:
            return run_record(self._run_row(session, run_id))

    def runs(self) -> list[RunRecord]:
        """All runs, oldest first."""
        with self._read() as session:
            return [run_record(row) for row in session.scalars(select(RunRow).order_by(RunRow.created_at, RunRow.id))]

    def latest_run(self, name: str, *, unfinished: bool) -> RunRecord | None:
        """The newest run of a name; with `unfinished`, the newest that is neither COMPLETED nor CANCELLED.

        Forks are passed over: they share their parent's name, not its config, and are gone on with by their id.
        """
        query = select(RunRow).where(RunRow.name == name, RunRow.base_step == 0)
        query = query.order_by(RunRow.created_at.desc(), RunRow.id.desc()).limit(1)
        if unfinished:
            query = query.where(RunRow.state.not_in(FINISHED_RUN_STATES))
        with self._read() as session:
            row = session.scalar(query)
            return None if row is None else run_record(row)

    def run_of_flow_run(self, flow_run_id: str) -> RunRecord | None:
        """The run on which a flow run has made its last attempt; None where it has made none."""
        query = select(AttemptRow.run_id).where(AttemptRow.flow_run_id == flow_run_id)
        with self._read() as session:
            run_id = session.scalar(query.order_by(AttemptRow.id.desc()).limit(1))
            return None if run_id is None else run_record(self._run_row(session, run_id))

    def attempts(self, run_id: str) -> list[AttemptRecord]:
        """All attempts of a run, first to last."""
        query = select(AttemptRow).where(AttemptRow.run_id == run_id).order_by(AttemptRow.number)
        with self._read() as session:
            return [_attempt_record(row) for row in session.scalars(query)]

    def unsettled_attempts(self, limit: int = 100) -> list[AttemptRecord]:
        """Ended attempts whose flow run no event `flow_settled` names, newest first; of those that share a flow run
        only the last counts, and none while that one runs."""
        newest = select(func.max(AttemptRow.id)).where(AttemptRow.flow_run_id.is_not(None))
        settled = select(EventRow.attempt_id).where(EventRow.kind == FLOW_SETTLED, EventRow.attempt_id.is_not(None))
        query = (
            select(AttemptRow)
            .where(AttemptRow.id.in_(newest.group_by(AttemptRow.flow_run_id)), AttemptRow.id.not_in(settled))
            .where(AttemptRow.state != AttemptState.RUNNING)
            .order_by(AttemptRow.id.desc())
            .limit(limit)
        )
        with self._read() as session:
            return [_attempt_record(row) for row in session.scalars(query)]

    def stage(self, run_id: str, step: int, name: str) -> StageRecord | None:
        """A committed stage, or None: then it has to be run."""
        with self._read() as session:
            row = session.get(StageRow, (run_id, step, name))
            return None if row is None else _stage_record(row)

    def stages(self, run_id: str, step: int | None = None) -> list[StageRecord]:
        """Committed stages of a run, or of one step, in the order of their commits."""
        query = select(StageRow).where(StageRow.run_id == run_id)
        if step is not None:
            query = query.where(StageRow.step == step)
        with self._read() as session:
            return [_stage_record(row) for row in session.scalars(query.order_by(StageRow.step, StageRow.committed_at))]

    def last_stage_step(self, run_id: str) -> int:
        """The last step of which any stage is committed; -1 where none is."""
        with self._read() as session:
            last = session.scalar(select(func.max(StageRow.step)).where(StageRow.run_id == run_id))
            return -1 if last is None else last

    def longest_stage_s(self, run_id: str, name: str) -> float | None:
        """Seconds that the slowest of a run's committed stages of this name took; None where there is none."""
        query = select(func.max(StageRow.seconds)).where(StageRow.run_id == run_id, StageRow.name == name)
        with self._read() as session:
            return session.scalar(query)

    def samples(self, run_id: str, step: int) -> list[SampleRow]:
        """The samples of a step, by prompt, epoch and index."""
        query = (
            select(SampleIndexRow)
            .where(SampleIndexRow.run_id == run_id, SampleIndexRow.step == step)
            .order_by(SampleIndexRow.uid, SampleIndexRow.epoch, SampleIndexRow.sample_index)
        )
        with self._read() as session:
            return [_sample_row(row) for row in session.scalars(query)]

    def last_step(self, run_id: str) -> int:
        """The last step up to which all of the run's own steps are committed; when there is none, its base step."""
        with self._read() as session:
            base = session.scalar(select(RunRow.base_step).where(RunRow.id == run_id)) or 0
            return last_contiguous(session, run_id, base)

    def checkpoints(self, run_id: str) -> list[CheckpointRecord]:
        """All checkpoints of a run by step, those whose files were deleted too."""
        query = select(CheckpointRow).where(CheckpointRow.run_id == run_id).order_by(CheckpointRow.step)
        with self._read() as session:
            return [_checkpoint_record(row) for row in session.scalars(query)]

    def events(self, run_id: str, kind: str | None = None) -> list[EventRecord]:
        """Events of a run, all or those of one kind, in the order they were entered."""
        query = select(EventRow).where(EventRow.run_id == run_id).order_by(EventRow.id)
        if kind is not None:
            query = query.where(EventRow.kind == kind)
        with self._read() as session:
            return [_event_record(row) for row in session.scalars(query)]

    def pending_metrics(self, run_id: str, limit: int = 1000) -> list[MetricPoint]:
        """Up to `limit` points that the tracking server does not have yet, by step, then as entered."""
        query = (
            select(OutboxRow)
            .where(OutboxRow.run_id == run_id, OutboxRow.sent.is_(False))
            .order_by(OutboxRow.step, OutboxRow.id)
            .limit(limit)
        )
        with self._read() as session:
            return [_metric_point(row) for row in session.scalars(query)]

    def count_pending(self, run_id: str) -> int:
        """How many points the tracking server does not have yet."""
        query = select(func.count(OutboxRow.id)).where(OutboxRow.run_id == run_id, OutboxRow.sent.is_(False))
        with self._read() as session:
            return session.scalar(query) or 0

    def metric_series(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """(step, value) of one metric by step, sent or not; NaN and infinities as they were."""
        query = select(OutboxRow).where(OutboxRow.run_id == run_id, OutboxRow.key == key).order_by(OutboxRow.step)
        with self._read() as session:
            return [(row.step, _metric_value(row)) for row in session.scalars(query)]

    def _run_row(self, session: Session, run_id: str) -> RunRow:
        row = session.get(RunRow, run_id)
        if row is None:
            newest = list(session.scalars(select(RunRow.id).order_by(RunRow.created_at.desc()).limit(5)))
            known = f"Its newest runs: {', '.join(newest)}." if newest else "It has no runs yet."
            raise LedgerError(f"run {run_id!r} is not in ledger {where(self._transactions.engine)}. {known}")
        return row


def run_record(row: RunRow) -> RunRecord:
    """The run of a row."""
    return RunRecord(
        run_id=row.id,
        name=row.name,
        state=RunState(row.state),
        config_json=row.config_json,
        config_hash=row.config_hash,
        seed=row.seed,
        steps_planned=row.steps_planned,
        t0_ms=row.t0_ms,
        mlflow_run_id=row.mlflow_run_id,
        parent_run_id=row.parent_run_id,
        base_step=row.base_step,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def last_contiguous(session: Session, run_id: str, base: int) -> int:
    """Of a run's committed steps, the last before the first gap after `base`: 3 for 1, 2, 3, 5 after 0."""
    last = base
    query = select(StepRow.step).where(StepRow.run_id == run_id, StepRow.step > base).order_by(StepRow.step)
    for step in session.scalars(query):
        if step != last + 1:
            break
        last = step
    return last


def _attempt_record(row: AttemptRow) -> AttemptRecord:
    return AttemptRecord(
        attempt_id=row.id,
        run_id=row.run_id,
        number=row.number,
        state=AttemptState(row.state),
        host=row.host,
        pid=row.pid,
        resume_step=row.resume_step,
        flow_run_id=row.flow_run_id,
        error=row.error,
        started_at=row.started_at,
        ended_at=row.ended_at,
    )


def _stage_record(row: StageRow) -> StageRecord:
    return StageRecord(
        run_id=row.run_id,
        step=row.step,
        name=row.name,
        attempt_id=row.attempt_id,
        input_digest=row.input_digest,
        path=row.path,
        digest=row.digest,
        seconds=row.seconds,
        metrics={key: float(value) for key, value in row.metrics.items()},
        committed_at=row.committed_at,
    )


def _sample_row(row: SampleIndexRow) -> SampleRow:
    return SampleRow(
        epoch=row.epoch,
        uid=row.uid,
        sample_index=row.sample_index,
        reward=row.reward,
        response_tokens=row.response_tokens,
        finish_reason=row.finish_reason,
    )


def _checkpoint_record(row: CheckpointRow) -> CheckpointRecord:
    return CheckpointRecord(
        step=row.step,
        path=row.path,
        manifest_sha256=row.manifest_sha256,
        bytes=row.bytes,
        state=CheckpointState(row.state),
    )


def _event_record(row: EventRow) -> EventRecord:
    return EventRecord(run_id=row.run_id, attempt_id=row.attempt_id, at=row.at, kind=row.kind, detail=row.detail)


def _metric_point(row: OutboxRow) -> MetricPoint:
    if row.value is None:
        return MetricPoint(id=row.id, key=f"nonfinite/{row.key}", step=row.step, value=1.0)
    return MetricPoint(id=row.id, key=row.key, step=row.step, value=row.value)


def _metric_value(row: OutboxRow) -> float:
    return float(row.value_text or "nan") if row.value is None else row.value
