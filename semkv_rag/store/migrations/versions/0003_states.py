"""Images' features."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "states",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("model", sa.String(128), sa.ForeignKey("models.fingerprint"), nullable=False),
        sa.Column("namespace", sa.String(128), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("row_count", sa.Integer, nullable=False),
        sa.Column("width", sa.Integer, nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
    )
    op.create_index("states_of_model", "states", ["model", "namespace"])
    op.create_index("states_by_use", "states", ["used_at", "id"])
    op.create_index("states_by_size", "states", ["namespace", "bytes"])
