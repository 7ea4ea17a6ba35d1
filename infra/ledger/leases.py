"""Who owns a run: takes, checks and gives back leases inside a caller's transaction.

A run has at most one owner. Every owner gets a higher fencing token, and every commit checks it: a process that lost
its lease while it was stopped, slow or cut off can wake up and still change nothing.
"""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psutil
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from moonshift.core.errors import LeaseHeldError, LeaseLostError, LedgerError

from .models import AttemptRow, LeaseRow, RunRow
from .records import Lease
from .states import ENDING_RUN_STATES, AttemptState, RunState

# A start time is computed from the boot time, which the kernel rounds: two readings can differ by a second.
_START_TIME_SLACK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStart:
    """What a new attempt says of itself."""

    lease_s: float
    flow_run_id: str | None
    resume_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """How an attempt ended, by its own word."""

    state: RunState
    error: str | None
    at: float
    """seconds since the epoch"""


def take_lease(session: Session, run: RunRow, start: AttemptStart) -> Lease:
    """Make this process the owner of `run` and open a new attempt.

    Raises LeaseHeldError when another owner's lease has not expired and its process may be alive.
    """
    now = time.time()
    lease = locked_lease(session, run.id)
    if lease.owner is not None and lease.expires_at > now and not _is_dead(lease.owner):
        held = LeaseHeldError(_held_message(run.id, lease.owner, lease.expires_at))
        held.until = lease.expires_at
        raise held
    _close_crashed(session, run.id, now)
    lease.token += 1
    lease.owner = {**_this_process(), "since": now}
    lease.expires_at = now + start.lease_s
    last = session.scalar(select(func.max(AttemptRow.number)).where(AttemptRow.run_id == run.id)) or 0
    attempt = AttemptRow(
        run_id=run.id,
        number=last + 1,
        state=AttemptState.RUNNING,
        host=lease.owner["host"],
        pid=lease.owner["pid"],
        resume_step=start.resume_step,
        flow_run_id=start.flow_run_id,
        started_at=now,
    )
    session.add(attempt)
    run.state = RunState.RUNNING
    run.updated_at = now
    session.flush()
    return Lease(run_id=run.id, attempt_id=attempt.id, attempt_number=attempt.number, token=lease.token)


def checked_lease(session: Session, lease: Lease) -> LeaseRow:
    """The locked row of a lease that still counts.

    Raises LeaseLostError when it was given back or another attempt has taken over.
    """
    row = locked_lease(session, lease.run_id)
    if row.token != lease.token:
        raise LeaseLostError(
            f"attempt {lease.attempt_number} of run {lease.run_id!r} has lost its lease (its token {lease.token}, now "
            f"{row.token}): another attempt took over. Nothing was written; end this process."
        )
    if row.owner is None:
        raise LeaseLostError(
            f"attempt {lease.attempt_number} of run {lease.run_id!r} has given its lease back and cannot write any "
            "more. Acquire the run again."
        )
    return row


def end_attempt(session: Session, lease: Lease, end: AttemptEnd) -> None:
    """Give the lease back and close the attempt. Raises LedgerError when its state does not end one."""
    if end.state not in ENDING_RUN_STATES:
        raise LedgerError(f"an attempt cannot end as {end.state}; it ends as one of {', '.join(ENDING_RUN_STATES)}.")
    row = checked_lease(session, lease)
    row.owner = None
    row.expires_at = 0.0
    attempt = session.get_one(AttemptRow, lease.attempt_id)
    attempt.state = AttemptState(end.state)
    attempt.error = None if end.error is None else _storable(end.error)
    attempt.ended_at = end.at


def locked_lease(session: Session, run_id: str) -> LeaseRow:
    """The lease's row, locked until the transaction ends. Raises LedgerError for an unknown run."""
    row = session.get(LeaseRow, run_id, with_for_update=True)
    if row is None:
        raise LedgerError(f"run {run_id!r} is not in this ledger. Check the run id and the ledger's URL.")
    return row


def _storable(words: str) -> str:
    """`words` with what no database's text can hold spelt out: half surrogates, and PostgreSQL's NUL."""
    return words.encode("utf-8", "backslashreplace").decode("utf-8").replace("\0", "\\x00")


def _close_crashed(session: Session, run_id: str, now: float) -> None:
    open_attempts: Sequence[AttemptRow] = session.scalars(
        select(AttemptRow).where(AttemptRow.run_id == run_id, AttemptRow.state == AttemptState.RUNNING)
    ).all()
    for attempt in open_attempts:
        attempt.state = AttemptState.CRASHED
        attempt.ended_at = now
        attempt.error = f"process {attempt.pid} on {attempt.host} ended, or let its lease expire, without a word"


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": psutil.Process().create_time()}


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner surely has ended: of a process on another host nothing is known before its lease expires."""
    if owner["host"] != socket.gethostname():
        return False
    try:
        process = psutil.Process(owner["pid"])
        if abs(process.create_time() - owner["pid_started"]) > _START_TIME_SLACK_S:
            return True  # the number was given to a new process
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _held_message(run_id: str, owner: dict[str, Any], expires_at: float) -> str:
    since, until = (
        datetime.fromtimestamp(moment, tz=UTC).isoformat(timespec="seconds") for moment in (owner["since"], expires_at)
    )
    return (
        f"run {run_id!r} is owned by process {owner['pid']} on {owner['host']} since {since}. Let it end, or stop that "
        f"process and start again; a lease that is not renewed ends by itself (this one at {until})."
    )
