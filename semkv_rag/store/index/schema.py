"""The index's tables, as of the newest migration.

Ids are the chunks' content addresses, so no table needs a key of its own. Token arrays are BLOBs of
little-endian int32. The tokens of a chunk stand apart from its row, so that listing and evicting
does not read them, and a context once, because the same prompt prefix stands before every chunk.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

REVISION: Final = "0007"
"""The newest migration: what a store is at once it was opened."""

metadata: Final = MetaData()

feed = Table(
    "feed",
    metadata,
    # One row, locked by every writer: it numbers the changes in the order of their commits.
    Column("id", Integer, primary_key=True),
    Column("first", BigInteger, nullable=False),
    Column("last", BigInteger, nullable=False),
)

changes = Table(
    "changes",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("model", String(128), nullable=False),
    Column("namespace", String(128), nullable=False),
    Column("chunk_id", String(64), nullable=False),
    Column("added", Boolean, nullable=False),
    Index("changes_of_namespace", "model", "namespace", "seq"),
)

models = Table(
    "models",
    metadata,
    Column("fingerprint", String(128), primary_key=True),
    Column("description", Text, nullable=False),
    Column("created_at", Double, nullable=False),
)

contexts = Table(
    "contexts",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("tokens", LargeBinary, nullable=False),
)

chunks = Table(
    "chunks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("model", String(128), ForeignKey("models.fingerprint"), nullable=False),
    Column("namespace", String(128), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("context", String(64), ForeignKey("contexts.digest"), nullable=False),
    Column("token_count", Integer, nullable=False),
    Column("context_count", Integer, nullable=False),
    Column("ranks", Integer, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False),
    Column("codec", String(32), nullable=False, server_default="plain"),
    Index("chunks_of_model", "model", "namespace"),
    Index("chunks_by_context", "context"),
    Index("chunks_by_use", "used_at", "id"),
    Index("chunks_by_size", "namespace", "bytes"),
)

chunk_tokens = Table(
    "chunk_tokens",
    metadata,
    Column("chunk_id", String(64), ForeignKey("chunks.id"), primary_key=True),
    Column("tokens", LargeBinary, nullable=False),
)

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("model", String(128), nullable=False),
    Column("namespace", String(128), nullable=False),
    Column("name", Text, nullable=False),
    Column("digest", String(128), nullable=False),
    Column("updated_at", Double, nullable=False),
    UniqueConstraint("model", "namespace", "name", name="sources_name"),
)

source_chunks = Table(
    "source_chunks",
    metadata,
    Column("source_id", Integer, ForeignKey("sources.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    # Not a foreign key: a source goes on listing a chunk that was evicted.
    Column("chunk_id", String(64), nullable=False),
    Index("source_chunks_by_chunk", "chunk_id"),
)

prompts = Table(
    "prompts",
    metadata,
    Column("chunk_id", String(64), ForeignKey("chunks.id"), primary_key=True),
    Column("model", String(128), nullable=False),
    Column("namespace", String(128), nullable=False),
    Column("key", String(64), nullable=False),
    Column("text", Text, nullable=False),
    Column("images", String(64), nullable=False),
    Column("source_version", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("prompts_by_key", "key", "namespace", "model"),
)

embeddings = Table(
    "embeddings",
    metadata,
    Column("chunk_id", String(64), ForeignKey("prompts.chunk_id"), primary_key=True),
    Column("layer", String(128), primary_key=True),
    Column("encoder", String(256), primary_key=True),
    # A number of the feed, so that one look at the feed's row tells whether there are new ones.
    Column("seq", BigInteger, nullable=False),
    Column("vector", LargeBinary, nullable=False),
    Index("embeddings_by_seq", "seq"),
)

outcomes = Table(
    "outcomes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("chunk_id", String(64), ForeignKey("prompts.chunk_id"), nullable=False),
    Column("layer", String(128), nullable=False),
    Column("encoder", String(256), nullable=False),
    Column("similarity", Double, nullable=False),
    Column("correct", Boolean, nullable=False),
    Column("at", Double, nullable=False),
    Index("outcomes_of_entry", "chunk_id", "layer", "encoder"),
)

sightings = Table(
    "sightings",
    metadata,
    Column("model", String(128), primary_key=True),
    Column("namespace", String(128), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("count", Integer, nullable=False),
    Column("seen_at", Double, nullable=False),
    Index("sightings_by_time", "seen_at"),
)

states = Table(
    "states",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("model", String(128), ForeignKey("models.fingerprint"), nullable=False),
    Column("namespace", String(128), nullable=False),
    Column("key", String(64), nullable=False),
    Column("row_count", Integer, nullable=False),
    Column("width", Integer, nullable=False),
    Column("dtype", String(16), nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("used_at", Double, nullable=False),
    Index("states_of_model", "model", "namespace"),
    Index("states_by_use", "used_at", "id"),
    Index("states_by_size", "namespace", "bytes"),
)

limits = Table(
    "limits",
    metadata,
    # Empty for the whole store, which no namespace is called.
    Column("namespace", String(128), primary_key=True),
    Column("max_bytes", BigInteger),
    Column("ttl_s", Double),
)

pins = Table(
    "pins",
    metadata,
    Column("id", Integer, primary_key=True),
    # NULL is any. A document's pin names its namespace and holds for what it becomes later, too.
    Column("model", String(128)),
    Column("namespace", String(128)),
    Column("source", Text),
    Index("pins_by_source", "source", "namespace"),
)

removals = Table(
    "removals",
    metadata,
    # Objects that are being deleted, and for a while those that were; see `index.removals`.
    Column("key", Text, primary_key=True),
    # NULL while it goes on.
    Column("number", BigInteger),
    Column("at", Double, nullable=False),
    Index("removals_by_number", "number"),
)
