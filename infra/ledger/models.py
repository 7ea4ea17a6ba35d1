"""The ledger's tables as typed SQLAlchemy models, in types that SQLite and PostgreSQL share.

Times are seconds since the epoch (UTC) as doubles, because SQLite keeps no time zone. Numbers that are not finite
never reach a number column: SQLite turns NaN into NULL, and PostgreSQL's JSON refuses it.
"""

from typing import Any

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, Integer, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite numbers rows by itself only in a column declared exactly INTEGER.
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")
_JSON = JSON(none_as_null=True)


class LedgerModel(DeclarativeBase):
    """Parent of all tables; names every constraint, so that a later migration can address it."""

    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        }
    )


class RunRow(LedgerModel):
    """One run: what was asked for, and where it stands."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(String(128), primary_key=True)
    name: Mapped[str] = mapped_column(String(100), index=True)
    state: Mapped[str] = mapped_column(String(16))
    config_json: Mapped[str] = mapped_column(Text)
    config_hash: Mapped[str] = mapped_column(String(128))
    seed: Mapped[int] = mapped_column(BigInteger)
    steps_planned: Mapped[int] = mapped_column(Integer)
    t0_ms: Mapped[int] = mapped_column(BigInteger)
    mlflow_run_id: Mapped[str | None] = mapped_column(String(128))
    parent_run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id"))
    base_step: Mapped[int] = mapped_column(Integer, server_default="0")
    """the parent's step that a fork goes on from; its own steps count from the next one"""
    created_at: Mapped[float] = mapped_column(Double)
    updated_at: Mapped[float] = mapped_column(Double)


class LeaseRow(LedgerModel):
    """Who owns a run; made with the run, so that taking it is always an update of one locked row."""

    __tablename__ = "leases"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    token: Mapped[int] = mapped_column(Integer)
    """rises by one at each owner; a commit that carries an older one is refused"""
    owner: Mapped[dict[str, Any] | None] = mapped_column(_JSON)
    """host, pid, pid_started, since; NULL: released"""
    expires_at: Mapped[float] = mapped_column(Double)


class AttemptRow(LedgerModel):
    """One process's try at a run."""

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    number: Mapped[int] = mapped_column(Integer)
    state: Mapped[str] = mapped_column(String(16))
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int] = mapped_column(Integer)
    resume_step: Mapped[int] = mapped_column(Integer)
    flow_run_id: Mapped[str | None] = mapped_column(String(128))
    error: Mapped[str | None] = mapped_column(Text)
    started_at: Mapped[float] = mapped_column(Double)
    ended_at: Mapped[float | None] = mapped_column(Double)


class StepRow(LedgerModel):
    """One committed step."""

    __tablename__ = "steps"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(String(16))
    policy_version: Mapped[int] = mapped_column(Integer)


class StageRow(LedgerModel):
    """One committed stage of a step; the key makes a second commit impossible."""

    __tablename__ = "stages"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    attempt_id: Mapped[int] = mapped_column(ForeignKey("attempts.id"))
    input_digest: Mapped[str] = mapped_column(String(128))
    path: Mapped[str] = mapped_column(Text)
    digest: Mapped[str] = mapped_column(String(128))
    seconds: Mapped[float] = mapped_column(Double)
    metrics: Mapped[dict[str, Any]] = mapped_column(_JSON)
    committed_at: Mapped[float] = mapped_column(Double)


class SampleIndexRow(LedgerModel):
    """One response and its reward; the text lies in the stage's output."""

    __tablename__ = "samples"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    uid: Mapped[str] = mapped_column(Text, primary_key=True)
    epoch: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    sample_index: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    reward: Mapped[float | None] = mapped_column(Double)
    response_tokens: Mapped[int] = mapped_column(Integer)
    finish_reason: Mapped[str] = mapped_column(String(32))


class CheckpointRow(LedgerModel):
    """One checkpoint on disk, or one that was."""

    __tablename__ = "checkpoints"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    path: Mapped[str] = mapped_column(Text)
    manifest_sha256: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))


class OutboxRow(LedgerModel):
    """One metric point, kept for good; `sent` says whether the tracking server has it."""

    __tablename__ = "metrics_outbox"
    __table_args__ = (
        UniqueConstraint("run_id", "key", "step"),
        Index("ix_metrics_outbox_pending", "run_id", "sent", "step", "id"),
    )

    id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    key: Mapped[str] = mapped_column(Text)
    step: Mapped[int] = mapped_column(Integer)
    value: Mapped[float | None] = mapped_column(Double)
    """NULL when the value is not finite"""
    value_text: Mapped[str | None] = mapped_column(String(8))
    """nan, inf or -inf; NULL when the value is finite"""
    sent: Mapped[bool]


class EventRow(LedgerModel):
    """Something that happened to a run and that a person may ask about."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(_ROW_ID, primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    attempt_id: Mapped[int | None] = mapped_column(ForeignKey("attempts.id"))
    at: Mapped[float] = mapped_column(Double)
    kind: Mapped[str] = mapped_column(String(64))
    detail: Mapped[dict[str, Any]] = mapped_column(_JSON)


class NightRow(LedgerModel):
    """Which flow run has a local date of a deployment; the key makes a second one impossible."""

    __tablename__ = "nights"

    deployment: Mapped[str] = mapped_column(String(255), primary_key=True)
    """flow and deployment, as in `post-train/nightly`: its id does not outlive the Prefect server's database"""
    local_date: Mapped[str] = mapped_column(String(10), primary_key=True)
    """YYYY-MM-DD in the schedule's time zone"""
    flow_run_id: Mapped[str] = mapped_column(String(128))
    claimed_at: Mapped[float] = mapped_column(Double)
