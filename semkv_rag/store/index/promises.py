"""Statements that promise chunks, and that take promises back. They read nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3
from sqlalchemy import Connection, bindparam, delete, exists, insert, select, update

from semkv_rag.reuse.tokens import TokenArray
from semkv_rag.store.files.header import token_bytes
from semkv_rag.store.index import feed, prompts
from semkv_rag.store.index.chunks import FoundChunk, pieces, put_model
from semkv_rag.store.index.feed import News
from semkv_rag.store.index.guard import refuse
from semkv_rag.store.index.keyed import insert_new, insert_over
from semkv_rag.store.index.schema import chunk_tokens, chunks, contexts
from semkv_rag.store.index.send import send
from semkv_rag.store.records import ChunkKey, ChunkRecord

_OF_FILES: Final = ("kind", "ranks", "bytes", "codec")
"""The columns that say what a chunk's files are."""

_SAME_ID: Final = chunks.c.id == bindparam("chunk_id")
_SAME_CODEC: Final = chunks.c.codec == bindparam("codec")
_NEW: Final = ~exists().where(_SAME_ID, _SAME_CODEC)
_RECODED: Final = exists().where(_SAME_ID, ~_SAME_CODEC)
_FILES_SAID_AGAIN: Final = (
    update(chunks).where(_SAME_ID).values({name: bindparam(f"own_{name}") for name in _OF_FILES})
)


def put(connection: Connection, found: Sequence[FoundChunk]) -> None:
    """Add chunks; of those that are there, say again what their files are. Reads nothing."""
    found = list({chunk.header.id: chunk for chunk in found}.values())
    if not found:
        return
    for model in {chunk.header.model for chunk in found}:
        put_model(connection, model, None)
    keys = [ChunkKey(one.header.id, one.header.model, one.header.namespace) for one in found]
    codecs = [{"codec": chunk.header.codec} for chunk in found]
    # Who follows must not take what a lossy codec left for exact: to them it is another chunk.
    feed.append(connection, News(keys, False, _RECODED, codecs), News(keys, True, _NEW, codecs))

    rows = _rows(connection, found)
    files = [{"chunk_id": row["id"], **{f"own_{f}": row[f] for f in _OF_FILES}} for row in rows]
    send(connection, _FILES_SAID_AGAIN, files)
    send(connection, insert_new(connection, chunks), rows)
    _put_tokens(connection, found)


def put_new(connection: Connection, found: Sequence[FoundChunk]) -> None:
    """Add chunks that are not there, refused where one is: `put` in fewer statements. Reads nothing."""
    found = list({chunk.header.id: chunk for chunk in found}.values())
    if not found:
        return
    ids = [chunk.header.id for chunk in found]
    refuse(connection, exists(select(chunks.c.id).where(chunks.c.id.in_(ids))))
    for model in {chunk.header.model for chunk in found}:
        put_model(connection, model, None)
    keys = [ChunkKey(one.header.id, one.header.model, one.header.namespace) for one in found]
    feed.append_new(connection, keys)
    send(connection, insert(chunks), _rows(connection, found))
    _put_tokens(connection, found)


def drop(connection: Connection, going: Sequence[ChunkRecord]) -> None:
    """Remove those of some chunks that are there, what is known of them as prompts, and the contexts
    that no chunk has any more. Reads nothing.
    """
    for piece in pieces(going):
        ids = [record.id for record in piece]
        digests = {record.context for record in piece}
        feed.append_gone(connection, ids)
        prompts.drop(connection, ids)
        send(connection, delete(chunk_tokens).where(chunk_tokens.c.chunk_id.in_(ids)))
        send(connection, delete(chunks).where(chunks.c.id.in_(ids)))
        still_used = exists().where(chunks.c.context == contexts.c.digest)
        send(connection, delete(contexts).where(contexts.c.digest.in_(digests), ~still_used))


def _put_tokens(connection: Connection, found: Sequence[FoundChunk]) -> None:
    """An id has the same tokens always, but for what somebody else wrote to the index."""
    rows = [{"chunk_id": c.header.id, "tokens": token_bytes(c.header.tokens)} for c in found]
    send(connection, insert_over(connection, chunk_tokens), rows)


def _rows(connection: Connection, found: Sequence[FoundChunk]) -> list[dict[str, object]]:
    """Rows of chunks whose contexts are stored."""
    digests = _put_contexts(connection, [chunk.header.context for chunk in found])
    return [_row(chunk, digest) for chunk, digest in zip(found, digests, strict=True)]


def _put_contexts(connection: Connection, arrays: Sequence[TokenArray]) -> list[str]:
    """Store each context once; their digests, one for each of `arrays`."""
    blobs = [token_bytes(array) for array in arrays]
    digests = [blake3(blob).hexdigest() for blob in blobs]
    by_digest = dict(zip(digests, blobs, strict=True))
    rows = [{"digest": digest, "tokens": blob} for digest, blob in by_digest.items()]
    send(connection, insert_new(connection, contexts), rows)
    return digests


def _row(chunk: FoundChunk, context: str) -> dict[str, object]:
    header = chunk.header
    return {
        "id": header.id,
        "model": header.model,
        "namespace": header.namespace,
        "kind": header.kind,
        "context": context,
        "token_count": len(header.tokens),
        "context_count": len(header.context),
        "ranks": header.world_size,
        "bytes": chunk.bytes,
        "created_at": header.created_at,
        "used_at": header.created_at,
        "codec": header.codec,
    }
