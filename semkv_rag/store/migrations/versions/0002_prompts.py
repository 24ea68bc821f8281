"""Whole prompts: their texts, vectors and outcomes, and how often a prompt was seen."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "prompts",
        sa.Column("chunk_id", sa.String(64), sa.ForeignKey("chunks.id"), primary_key=True),
        sa.Column("model", sa.String(128), nullable=False),
        sa.Column("namespace", sa.String(128), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("images", sa.String(64), nullable=False),
        sa.Column("source_version", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_index("prompts_by_key", "prompts", ["key", "namespace", "model"])
    op.create_table(
        "embeddings",
        sa.Column("chunk_id", sa.String(64), sa.ForeignKey("prompts.chunk_id"), primary_key=True),
        sa.Column("layer", sa.String(128), primary_key=True),
        sa.Column("encoder", sa.String(256), primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("vector", sa.LargeBinary, nullable=False),
    )
    op.create_index("embeddings_by_seq", "embeddings", ["seq"])
    op.create_table(
        "outcomes",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("chunk_id", sa.String(64), sa.ForeignKey("prompts.chunk_id"), nullable=False),
        sa.Column("layer", sa.String(128), nullable=False),
        sa.Column("encoder", sa.String(256), nullable=False),
        sa.Column("similarity", sa.Double, nullable=False),
        sa.Column("correct", sa.Boolean, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
    )
    op.create_index("outcomes_of_entry", "outcomes", ["chunk_id", "layer", "encoder"])
    op.create_table(
        "sightings",
        sa.Column("model", sa.String(128), primary_key=True),
        sa.Column("namespace", sa.String(128), primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
    )
    op.create_index("sightings_by_time", "sightings", ["seen_at"])
