"""How chunks' K and V stand in their files."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    codec = sa.Column("codec", sa.String(32), nullable=False, server_default="plain")
    op.add_column("chunks", codec)
