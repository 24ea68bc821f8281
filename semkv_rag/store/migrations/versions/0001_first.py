"""The first schema."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "feed",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.Column("last", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "changes",
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("namespace", sa.String(128), nullable=False),
        sa.Column("chunk_id", sa.String(64), nullable=False),
        sa.Column("added", sa.Boolean, nullable=False),
    )
    op.create_table(
        "models",
        sa.Column("fingerprint", sa.String(128), primary_key=True),
        sa.Column("description", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "contexts",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("tokens", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "chunks",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("model", sa.String(128), sa.ForeignKey("models.fingerprint"), nullable=False),
        sa.Column("namespace", sa.String(128), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("context", sa.String(64), sa.ForeignKey("contexts.digest"), nullable=False),
        sa.Column("token_count", sa.Integer, nullable=False),
        sa.Column("context_count", sa.Integer, nullable=False),
        sa.Column("ranks", sa.Integer, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("used_at", sa.Double, nullable=False),
    )
    op.create_index("chunks_of_model", "chunks", ["model", "namespace"])
    op.create_index("chunks_by_context", "chunks", ["context"])
    op.create_index("chunks_by_use", "chunks", ["used_at", "id"])
    op.create_index("chunks_by_size", "chunks", ["namespace", "bytes"])
    op.create_table(
        "chunk_tokens",
        sa.Column("chunk_id", sa.String(64), sa.ForeignKey("chunks.id"), primary_key=True),
        sa.Column("tokens", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "sources",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("namespace", sa.String(128), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("digest", sa.String(128), nullable=False),
        sa.Column("updated_at", sa.Double, nullable=False),
        sa.UniqueConstraint("model", "namespace", "name", name="sources_name"),
    )
    op.create_table(
        "source_chunks",
        sa.Column("source_id", sa.Integer, sa.ForeignKey("sources.id"), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True),
        sa.Column("chunk_id", sa.String(64), nullable=False),
    )
    op.create_index("source_chunks_by_chunk", "source_chunks", ["chunk_id"])
    # Numbers start at the time in microseconds: they are above all those of an index that stood here
    # before, so that who followed that one sees that it must start anew.
    start = time.time_ns() // 1000
    op.execute(f"INSERT INTO feed (id, first, last) VALUES (1, {start}, {start})")
