"""Objects that are being deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "removals",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_index("removals_by_number", "removals", ["number"])
