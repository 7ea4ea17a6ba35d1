"""The ledger: decides what has happened in a run.

Every write is one transaction. Every write that belongs to an attempt checks the attempt's fencing token in that same
transaction, so a stage is either committed with its metrics and samples by the run's owner, or not at all.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from moonshift.core.errors import LedgerError

from .engine import insert_new, lock_run_numbers, migrate, open_engine
from .faults import where
from .leases import AttemptEnd, AttemptStart, checked_lease, end_attempt, locked_lease, take_lease
from .models import (
    AttemptRow,
    CheckpointRow,
    EventRow,
    LeaseRow,
    NightRow,
    OutboxRow,
    RunRow,
    SampleIndexRow,
    StageRow,
    StepRow,
)
from .reader import LedgerReader, last_contiguous, run_record
from .records import CheckpointRecord, Lease, NewRun, RunRecord, StageCommit, finite_json
from .rows import checkpoint_row, outbox_values, sample_values, stage_row
from .states import CheckpointState, RunState, StepState
from .transactions import Patience, Transactions, never_found

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_RUN_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")  # longer than a name: its number is in it
_MAX_INTEGER = 2**63 - 1
_IDS_PER_UPDATE = 500  # below every database's limit on bound parameters


class Ledger(LedgerReader):
    """One database of runs; safe to use from several threads and processes at once.

    Example: `lease = ledger.acquire(run.run_id, lease_s=60)`, then `ledger.commit_stage(lease, commit)`.
    """

    @classmethod
    def open(
        cls,
        url: str,
        *,
        busy_timeout_s: float = 30.0,
        retry_s: float = 60.0,
        seconds_left: Callable[[], float] = lambda: math.inf,
    ) -> Self:
        """Open the ledger at `url`, making or migrating it first.

        A write waits up to `busy_timeout_s` seconds for a lock. Whatever is asked or written later and meets a ledger
        that is locked for longer or away is tried again for `retry_s` seconds; opening is not. Neither goes on when
        `seconds_left` says 0. Raises LedgerAwayError (locked, no server), LedgerError (URL, driver, log-in, not a
        ledger, newer schema) or StorageError (folder or file).
        """
        engine = open_engine(url, busy_timeout_s=busy_timeout_s)
        try:
            migrate(engine)
        except BaseException:
            engine.dispose()
            raise
        return cls(Transactions(engine, Patience(lock_s=busy_timeout_s, retry_s=retry_s, seconds_left=seconds_left)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create_run(
        self,
        new: NewRun,
        *,
        checkpoint: CheckpointRecord | None = None,
        events: Sequence[tuple[str, dict[str, Any]]] = (),
    ) -> RunRecord:
        """Enter a run in state CREATED, with the checkpoint and the (kind, detail) events that it begins with, if any.

        Raises LedgerError for a name or id that could not safely name a folder, an id that is taken, a parent that is
        not there, or numbers out of range.
        """
        _check_new_run(new)
        now = time.time()

        def work(session: Session) -> RunRecord:
            lock_run_numbers(session.connection())
            if new.parent_run_id is not None:
                self._run_row(session, new.parent_run_id)
            run_id = new.run_id or _next_run_id(session, new.name)
            if session.get(RunRow, run_id) is not None:
                raise LedgerError(
                    f"run {run_id!r} is already in ledger {where(self._transactions.engine)}. Resume it, or leave "
                    "the id out."
                )
            row = RunRow(
                id=run_id,
                name=new.name,
                state=RunState.CREATED,
                config_json=new.config_json,
                config_hash=new.config_hash,
                seed=new.seed,
                steps_planned=new.steps_planned,
                t0_ms=int(now * 1000),
                parent_run_id=new.parent_run_id,
                base_step=new.base_step,
                created_at=now,
                updated_at=now,
            )
            session.add(row)
            session.flush()
            session.add(LeaseRow(run_id=run_id, token=0, owner=None, expires_at=0.0))
            if checkpoint is not None:
                session.add(checkpoint_row(run_id, checkpoint))
            session.add_all(
                EventRow(run_id=run_id, attempt_id=None, at=now, kind=kind, detail=finite_json(detail))
                for kind, detail in events
            )
            return run_record(row)

        return self._transactions.write(work)

    def set_run_state(self, lease: Lease, state: RunState) -> None:
        """Set the state of the run.

        Raises LeaseLostError for a lost lease, LedgerError for COMPLETED before the planned steps are.
        """

        def work(session: Session) -> None:
            checked_lease(session, lease)
            self._set_state(session, lease.run_id, state)

        self._transactions.settle(work, never_found)

    def set_mlflow_run_id(self, lease: Lease, mlflow_run_id: str) -> None:
        """Say which MLflow run shows this run. Raises LeaseLostError for a lost lease."""

        def work(session: Session) -> None:
            checked_lease(session, lease)
            row = self._run_row(session, lease.run_id)
            row.mlflow_run_id = mlflow_run_id
            row.updated_at = time.time()

        self._transactions.settle(work, never_found)

    def set_steps_planned(self, lease: Lease, steps: int) -> None:
        """Say how many steps the run has, after it was lengthened. Raises LeaseLostError for a lost lease."""

        def work(session: Session) -> None:
            checked_lease(session, lease)
            self._run_row(session, lease.run_id).steps_planned = steps

        self._transactions.settle(work, never_found)

    def acquire(self, run_id: str, *, lease_s: float, flow_run_id: str | None = None, resume_step: int = 0) -> Lease:
        """Become the owner of a run for `lease_s` seconds and open an attempt; the run is RUNNING from now on.

        Possible when the run has no owner, the owner's lease has expired, or the owner was a process of this host
        that has ended; its attempt is closed as CRASHED. Raises LeaseHeldError otherwise.
        """
        start = AttemptStart(lease_s=lease_s, flow_run_id=flow_run_id, resume_step=resume_step)
        return self._transactions.write(lambda session: take_lease(session, self._run_row(session, run_id), start))

    def heartbeat(self, lease: Lease, lease_s: float) -> None:
        """Own the run for `lease_s` seconds from now.

        Raises LeaseLostError when the lease was lost, LedgerAwayError at once when the ledger is locked or away: the
        next beat is the second try.
        """

        def work(session: Session) -> None:
            checked_lease(session, lease).expires_at = time.time() + lease_s

        self._transactions.once(work)

    @contextmanager
    def owned(self, lease: Lease) -> Iterator[None]:
        """Within, the run is this lease's and nobody can take it over: its row is locked.

        Keep it short: every other writer of a SQLite ledger waits, and a server's lock ends with the connection. Raises
        LeaseLostError for a lost lease.
        """
        with self._transactions.holding(lambda session: checked_lease(session, lease)):
            yield

    def release(self, lease: Lease, state: RunState, error: str | None = None) -> None:
        """End the attempt and give the run back; attempt and run get `state`.

        Raises LeaseLostError for a lost lease, LedgerError for a state that ends nothing, or COMPLETED before the
        planned steps are.
        """
        now = time.time()

        def work(session: Session) -> None:
            end_attempt(session, lease, AttemptEnd(state=state, error=error, at=now))
            self._set_state(session, lease.run_id, state)

        def found(session: Session) -> bool:
            locked_lease(session, lease.run_id)
            return session.get_one(AttemptRow, lease.attempt_id).ended_at == now

        self._transactions.settle(work, found)

    def commit_stage(self, lease: Lease, commit: StageCommit) -> None:
        """Commit a stage, its sample rows and one outbox row a metric: all of it or nothing.

        Raises LeaseLostError for a lost lease, LedgerError for a stage that is committed already, or a metric or
        sample there twice.
        """
        now = time.time()

        def work(session: Session) -> None:
            checked_lease(session, lease)
            _refuse_second_commit(session, lease.run_id, commit)
            session.add(stage_row(lease, commit, now))
            session.flush()
            if commit.samples:
                session.execute(insert(SampleIndexRow), sample_values(lease.run_id, commit))
            if commit.metrics:
                session.execute(insert(OutboxRow), outbox_values(lease.run_id, commit))

        def found(session: Session) -> bool:
            locked_lease(session, lease.run_id)
            row = session.get(StageRow, (lease.run_id, commit.step, commit.name))
            return row is not None and (row.attempt_id, row.committed_at) == (lease.attempt_id, now)

        self._transactions.settle(work, found)

    def commit_step(self, lease: Lease, step: int, policy_version: int) -> None:
        """Commit a step; `policy_version` steps have been applied to the weights now.

        Raises LeaseLostError for a lost lease, LedgerError for a step that is committed already, or one that is not the
        run's own.
        """

        def work(session: Session) -> None:
            checked_lease(session, lease)
            first = self._run_row(session, lease.run_id).base_step + 1
            if step < first:
                raise LedgerError(
                    f"step {step} of run {lease.run_id!r} cannot be committed: steps are counted from {first}."
                )
            if session.get(StepRow, (lease.run_id, step)) is not None:
                raise LedgerError(f"step {step} of run {lease.run_id!r} is committed already. Go on with the next one.")
            session.add(
                StepRow(run_id=lease.run_id, step=step, state=StepState.COMMITTED, policy_version=policy_version)
            )
            self._run_row(session, lease.run_id).updated_at = time.time()

        def found(session: Session) -> bool:
            checked_lease(session, lease)  # so that nobody but this attempt can have committed it
            row = session.get(StepRow, (lease.run_id, step))
            return row is not None and row.policy_version == policy_version

        self._transactions.settle(work, found)

    def record_checkpoint(self, lease: Lease, checkpoint: CheckpointRecord) -> None:
        """Enter a checkpoint; one written again for the same step takes the place of the first.

        Raises LeaseLostError for a lost lease.
        """

        def work(session: Session) -> None:
            checked_lease(session, lease)
            session.merge(checkpoint_row(lease.run_id, checkpoint))

        self._transactions.settle(work, never_found)

    def mark_checkpoint_deleted(self, lease: Lease, step: int) -> None:
        """Say that a checkpoint's files are gone. Raises LeaseLostError, or LedgerError for an unknown one."""

        def work(session: Session) -> None:
            checked_lease(session, lease)
            row = session.get(CheckpointRow, (lease.run_id, step))
            if row is None:
                raise LedgerError(f"run {lease.run_id!r} has no checkpoint of step {step} in the ledger.")
            row.state = CheckpointState.DELETED

        self._transactions.settle(work, never_found)

    def event(self, run_id: str, kind: str, detail: dict[str, Any], attempt_id: int | None = None) -> None:
        """Note that something happened; needs no lease, so that an onlooker can report too.

        `detail` is JSON; NaN and infinities become texts. Raises LedgerError for an unknown run or attempt.
        """
        entry = {"run_id": run_id, "attempt_id": attempt_id, "at": time.time(), "kind": kind}

        def work(session: Session) -> None:
            self._run_row(session, run_id)
            session.add(EventRow(**entry, detail=finite_json(detail)))

        def found(session: Session) -> bool:
            session.get(RunRow, run_id, with_for_update=True)  # what enters an event holds it for its foreign key
            return session.scalar(select(EventRow.id).filter_by(**entry).limit(1)) is not None

        self._transactions.settle(work, found)

    def mark_sent(self, ids: Sequence[int]) -> None:
        """Say that the tracking server has these points; saying it twice changes nothing."""

        def work(session: Session) -> None:
            for start in range(0, len(ids), _IDS_PER_UPDATE):
                chunk = ids[start : start + _IDS_PER_UPDATE]
                session.execute(update(OutboxRow).where(OutboxRow.id.in_(chunk)).values(sent=True))

        self._transactions.settle(work, never_found)

    def claim_night(self, deployment: str, local_date: str, flow_run_id: str) -> str:
        """Give a deployment's local date to a flow run unless another one has it; returns the id of the one that has.

        Claiming twice for one flow run changes nothing.
        """
        row = {
            "deployment": deployment,
            "local_date": local_date,
            "flow_run_id": flow_run_id,
            "claimed_at": time.time(),
        }

        def work(session: Session) -> None:
            session.execute(insert_new(session, NightRow).values(row))

        self._transactions.settle(work, never_found)
        with self._read() as session:
            return session.get_one(NightRow, (deployment, local_date)).flow_run_id

    def _set_state(self, session: Session, run_id: str, state: RunState) -> None:
        row = self._run_row(session, run_id)
        if state is RunState.COMPLETED:
            done = last_contiguous(session, run_id, row.base_step)
            if done < row.steps_planned:
                raise LedgerError(
                    f"run {run_id!r} cannot be COMPLETED: {done} of its {row.steps_planned} planned steps are "
                    "committed. Commit the others, or end it in another state."
                )
        row.state = state
        row.updated_at = time.time()


def _check_new_run(new: NewRun) -> None:
    allowed = "letters, digits, '.', '_' and '-' are allowed, no dot in front"
    if not _NAME.fullmatch(new.name):
        raise LedgerError(f"run name {new.name!r} cannot name a folder: 1 to 100 {allowed}.")
    if new.run_id is not None and not _RUN_ID.fullmatch(new.run_id):
        raise LedgerError(f"run id {new.run_id!r} cannot name a folder: 1 to 128 {allowed}.")
    if not 0 <= new.seed <= _MAX_INTEGER:
        raise LedgerError(f"seed {new.seed} of run {new.name!r} is out of range: choose one from 0 to 2^63 - 1.")
    if new.steps_planned < 0:
        raise LedgerError(f"run {new.name!r} plans {new.steps_planned} steps: plan 0 or more.")
    if new.base_step < 0 or (new.base_step and (new.parent_run_id is None or new.steps_planned <= new.base_step)):
        raise LedgerError(
            f"run {new.name!r} cannot begin after step {new.base_step} of {new.parent_run_id or 'no parent'} and plan "
            f"{new.steps_planned} steps: a fork names its parent, and plans more steps than it takes over."
        )


def _next_run_id(session: Session, name: str) -> str:
    """The name and the number after the highest that an id of this form has."""
    numbered = re.compile(re.escape(name) + r"-([0-9]+)")
    ids = session.scalars(select(RunRow.id).where(RunRow.id.startswith(f"{name}-", autoescape=True)))
    used = [int(match.group(1)) for match in map(numbered.fullmatch, ids) if match]
    return f"{name}-{max(used, default=0) + 1:04d}"


def _refuse_second_commit(session: Session, run_id: str, commit: StageCommit) -> None:
    if session.get(StageRow, (run_id, commit.step, commit.name)) is not None:
        raise LedgerError(
            f"stage {commit.name!r} of step {commit.step} of run {run_id!r} is committed already. "
            "Ask for it with stage() and use its output."
        )
    if commit.metrics:
        present = select(OutboxRow.key).where(
            OutboxRow.run_id == run_id, OutboxRow.step == commit.step, OutboxRow.key.in_(commit.metrics)
        )
        twice = sorted(session.scalars(present))
        if twice:
            raise LedgerError(
                f"stage {commit.name!r} of step {commit.step} of run {run_id!r} reports metrics that another stage of "
                f"this step has reported: {', '.join(twice)}. Name them apart."
            )
