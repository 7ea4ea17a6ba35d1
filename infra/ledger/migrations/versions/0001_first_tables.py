"""The first tables: runs, leases, attempts, steps, stages, samples, checkpoints, metrics outbox, events."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _run_id(table: str) -> tuple[sa.Column[str], sa.ForeignKeyConstraint]:
    """Column `run_id` and its foreign key."""
    column = sa.Column("run_id", sa.String(128), nullable=False)
    return column, sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=f"fk_{table}_run_id_runs")


def _whole(name: str) -> sa.Column[int]:
    """A column of whole numbers that the database never fills by itself."""
    return sa.Column(name, sa.Integer, nullable=False, autoincrement=False)


def _create_owners() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("config_json", sa.Text, nullable=False),
        sa.Column("config_hash", sa.String(128), nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("steps_planned", sa.Integer, nullable=False),
        sa.Column("t0_ms", sa.BigInteger, nullable=False),
        sa.Column("mlflow_run_id", sa.String(128)),
        sa.Column("parent_run_id", sa.String(128)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
        sa.ForeignKeyConstraint(["parent_run_id"], ["runs.id"], name="fk_runs_parent_run_id_runs"),
    )
    op.create_index("ix_runs_name", "runs", ["name"])
    op.create_table(
        "leases",
        *_run_id("leases"),
        sa.Column("token", sa.Integer, nullable=False),
        sa.Column("owner", sa.JSON),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_leases"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer, nullable=False),
        *_run_id("attempts"),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("resume_step", sa.Integer, nullable=False),
        sa.Column("flow_run_id", sa.String(128)),
        sa.Column("error", sa.Text),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.UniqueConstraint("run_id", "number", name="uq_attempts_run_id_number"),
    )


def _create_steps() -> None:
    op.create_table(
        "steps",
        *_run_id("steps"),
        _whole("step"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_steps"),
    )
    op.create_table(
        "stages",
        *_run_id("stages"),
        _whole("step"),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("attempt_id", sa.Integer, nullable=False),
        sa.Column("input_digest", sa.String(128), nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("metrics", sa.JSON, nullable=False),
        sa.Column("committed_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", "name", name="pk_stages"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_stages_attempt_id_attempts"),
    )
    op.create_table(
        "samples",
        *_run_id("samples"),
        _whole("step"),
        sa.Column("uid", sa.Text, nullable=False),
        _whole("epoch"),
        _whole("sample_index"),
        sa.Column("reward", sa.Double),
        sa.Column("response_tokens", sa.Integer, nullable=False),
        sa.Column("finish_reason", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", "uid", "epoch", "sample_index", name="pk_samples"),
    )


def _create_outputs() -> None:
    op.create_table(
        "checkpoints",
        *_run_id("checkpoints"),
        _whole("step"),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("manifest_sha256", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_checkpoints"),
    )
    op.create_table(
        "metrics_outbox",
        sa.Column("id", _ROW_ID, nullable=False),
        *_run_id("metrics_outbox"),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("step", sa.Integer, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("value_text", sa.String(8)),
        sa.Column("sent", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_metrics_outbox"),
        sa.UniqueConstraint("run_id", "key", "step", name="uq_metrics_outbox_run_id_key_step"),
    )
    op.create_index("ix_metrics_outbox_pending", "metrics_outbox", ["run_id", "sent", "step", "id"])
    op.create_table(
        "events",
        sa.Column("id", _ROW_ID, nullable=False),
        *_run_id("events"),
        sa.Column("attempt_id", sa.Integer),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_events_attempt_id_attempts"),
    )
    op.create_index("ix_events_run_id", "events", ["run_id"])


def upgrade() -> None:
    """Create all tables; owners first, because the others refer to them."""
    _create_owners()
    _create_steps()
    _create_outputs()


def downgrade() -> None:
    """Drop all tables, and with them everything the ledger knows."""
    for table in (
        "events",
        "metrics_outbox",
        "checkpoints",
        "samples",
        "stages",
        "steps",
        "attempts",
        "leases",
        "runs",
    ):
        op.drop_table(table)
