"""Limits and pins."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "limits",
        sa.Column("namespace", sa.String(128), primary_key=True),
        sa.Column("max_bytes", sa.BigInteger),
        sa.Column("ttl_s", sa.Double),
    )
    op.create_table(
        "pins",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("model", sa.String(128)),
        sa.Column("namespace", sa.String(128)),
        sa.Column("source", sa.Text),
    )
    op.create_index("pins_by_source", "pins", ["source", "namespace"])
