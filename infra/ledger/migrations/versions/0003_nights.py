"""Which flow run has a deployment's local date: the unique key that lets one schedule slot run once."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """No date is taken yet."""
    op.create_table(
        "nights",
        sa.Column("deployment", sa.String(255), nullable=False),
        sa.Column("local_date", sa.String(10), nullable=False),
        sa.Column("flow_run_id", sa.String(128), nullable=False),
        sa.Column("claimed_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("deployment", "local_date", name="pk_nights"),
    )


def downgrade() -> None:
    """Forget which dates had their run."""
    op.drop_table("nights")
