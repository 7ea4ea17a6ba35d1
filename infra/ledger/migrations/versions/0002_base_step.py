"""The step of its parent that a forked run goes on from; 0 for a run that began at its own beginning."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Runs that are there already were not forked."""
    op.add_column("runs", sa.Column("base_step", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    """Forget where forks began; their steps then seem to have a gap before them."""
    with op.batch_alter_table("runs") as table:
        table.drop_column("base_step")
