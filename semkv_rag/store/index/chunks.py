"""Statements about chunks, their tokens and their models.

Id lists are cut into pieces, because databases bound the parameters of a statement.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from sqlalchemy import (
    ColumnElement,
    Connection,
    ScalarSelect,
    delete,
    exists,
    func,
    select,
    true,
    tuple_,
    update,
)

from semkv_rag.errors import OptionError
from semkv_rag.reuse.tokens import StoredTokens, TokenArray
from semkv_rag.store.codecs import codec_named
from semkv_rag.store.files.header import ChunkHeader
from semkv_rag.store.index.keyed import insert_new
from semkv_rag.store.index.schema import chunk_tokens, chunks, contexts, models, sources, states
from semkv_rag.store.index.send import send
from semkv_rag.store.records import ChunkRecord, ModelInfo, NamespaceStats

PAGE = 1000
Item = TypeVar("Item")

_RECORD = select(
    chunks.c.id,
    chunks.c.model,
    chunks.c.namespace,
    chunks.c.kind,
    chunks.c.token_count,
    chunks.c.context_count,
    chunks.c.bytes,
    chunks.c.created_at,
    chunks.c.used_at,
    chunks.c.ranks,
    chunks.c.codec,
    chunks.c.context,
)


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """A chunk whose files are on disk: what the first one's header says, and the size of all."""

    header: ChunkHeader
    bytes: int


def pieces(items: Iterable[Item], size: int = PAGE) -> Iterator[list[Item]]:
    """`items` in lists of at most `size`."""
    iterator = iter(items)
    while piece := list(islice(iterator, size)):
        yield piece


def scope(model: str | None, namespace: str | None, kind: str | None = None) -> ColumnElement[bool]:
    """The condition that a chunk is of a model, a namespace and a kind; None is any."""
    condition: ColumnElement[bool] = true()
    if model is not None:
        condition &= chunks.c.model == model
    if namespace is not None:
        condition &= chunks.c.namespace == namespace
    if kind is not None:
        condition &= chunks.c.kind == kind
    return condition


def _owned(model: str, namespace: str) -> ColumnElement[bool]:
    """`scope` beside a condition on ids, in words that no index answers to.

    SQLite would read all of a namespace's rows rather than look up sixteen ids.
    """
    return (chunks.c.model + "" == model) & (chunks.c.namespace + "" == namespace)


def describes(connection: Connection, fingerprint: str, description: Mapping[str, str]) -> bool:
    """Whether a model is there with this description."""
    text = select(models.c.description).filter_by(fingerprint=fingerprint)
    return connection.scalar(text) == _text_of(description)


def put_model(
    connection: Connection, fingerprint: str, description: Mapping[str, str] | None
) -> None:
    """Add a model, or change its description when one is given."""
    text = _text_of(description or {})
    row = {"fingerprint": fingerprint, "description": text, "created_at": time.time()}
    send(connection, insert_new(connection, models), [row])
    if description is not None:
        changed = update(models).filter_by(fingerprint=fingerprint)
        send(connection, changed.values(description=text))


def _text_of(description: Mapping[str, str]) -> str:
    return json.dumps(dict(description))


def all_models(connection: Connection) -> list[ModelInfo]:
    rows = connection.execute(select(models).order_by(models.c.created_at))
    return [ModelInfo(row[0], json.loads(row[1]), row[2]) for row in rows]


def drop_model(connection: Connection, fingerprint: str) -> None:
    """Forget a model, unless something is stored for it."""
    unused = [~exists().where(table.c.model == fingerprint) for table in (chunks, states, sources)]
    connection.execute(delete(models).where(models.c.fingerprint == fingerprint, *unused))


def records(
    connection: Connection, ids: Iterable[str], model: str, namespace: str
) -> list[ChunkRecord]:
    """The records of those of `ids` that are there, in no order."""
    return [
        _record(row)
        for piece in pieces(ids)
        for row in connection.execute(
            _RECORD.where(chunks.c.id.in_(piece), _owned(model, namespace))
        )
    ]


def find(connection: Connection, ids: Iterable[str]) -> list[ChunkRecord]:
    """The records of those of `ids` that are there, whosever they are, in no order."""
    return [
        _record(row)
        for piece in pieces(ids)
        for row in connection.execute(_RECORD.where(chunks.c.id.in_(piece)))
    ]


def page(
    connection: Connection, after: str, model: str | None, namespace: str | None
) -> list[ChunkRecord]:
    """The next records in the order of their ids."""
    next_ = _RECORD.where(chunks.c.id > after, scope(model, namespace)).order_by(chunks.c.id)
    return [_record(row) for row in connection.execute(next_.limit(PAGE))]


def tokens(
    connection: Connection, ids: Iterable[str], model: str, namespace: str
) -> dict[str, StoredTokens]:
    """The tokens of those of `ids` that are there. Chunks of the same context share its array."""
    found: dict[str, StoredTokens] = {}
    arrays: dict[str, TokenArray] = {}
    for piece in pieces(ids):
        rows = connection.execute(
            select(chunks.c.id, chunks.c.context, chunk_tokens.c.tokens, chunks.c.codec)
            .join(chunk_tokens, chunk_tokens.c.chunk_id == chunks.c.id)
            .where(chunks.c.id.in_(piece), _owned(model, namespace))
        ).all()
        if unread := {row[1] for row in rows} - arrays.keys():
            statement = select(contexts.c.digest, contexts.c.tokens)
            for digest, blob in connection.execute(statement.where(contexts.c.digest.in_(unread))):
                arrays[digest] = np.frombuffer(blob, "<i4")
        for id_, digest, blob, codec in rows:
            if digest in arrays:  # it is, unless somebody else wrote to the index
                found[id_] = StoredTokens(
                    np.frombuffer(blob, "<i4"), arrays[digest], codec, _is_lossless(codec)
                )
    return found


def touch(connection: Connection, ids: Iterable[str], now: float) -> None:
    for piece in pieces(ids):
        send(connection, update(chunks).where(chunks.c.id.in_(piece)).values(used_at=now))


def total_bytes(namespace: str | None, kind: str | None) -> ScalarSelect[int]:
    """A query's part: what chunks take."""
    size = select(func.coalesce(func.sum(chunks.c.bytes), 0)).where(scope(None, namespace, kind))
    return size.scalar_subquery()


def least_recently_used(
    connection: Connection,
    condition: ColumnElement[bool],
    limit: int,
    after: tuple[float, str] | None = None,
) -> list[ChunkRecord]:
    """The next `limit` records under a condition, those that were unused for longest first.

    Args:
        after: time of use and id of the record to go on behind.
    """
    oldest = _RECORD.where(condition).order_by(chunks.c.used_at, chunks.c.id)
    if after is not None:
        oldest = oldest.where(tuple_(chunks.c.used_at, chunks.c.id) > after)
    return [_record(row) for row in connection.execute(oldest.limit(limit))]


def stats(connection: Connection, namespace: str | None) -> list[NamespaceStats]:
    """Per model and namespace that has a chunk or a source."""
    counted = (
        select(
            chunks.c.model,
            chunks.c.namespace,
            func.count(),
            func.sum(chunks.c.token_count),
            func.sum(chunks.c.bytes),
        )
        .where(scope(None, namespace))
        .group_by(chunks.c.model, chunks.c.namespace)
    )
    listed = select(sources.c.model, sources.c.namespace, func.count())
    if namespace is not None:
        listed = listed.where(sources.c.namespace == namespace)
    documents = {
        (row[0], row[1]): row[2]
        for row in connection.execute(listed.group_by(sources.c.model, sources.c.namespace))
    }
    found = {(row[0], row[1]): row[2:] for row in connection.execute(counted)}
    return [
        NamespaceStats(
            model=key[0],
            namespace=key[1],
            chunks=int(found[key][0]) if key in found else 0,
            sources=documents.get(key, 0),
            tokens=int(found[key][1]) if key in found else 0,
            bytes=int(found[key][2]) if key in found else 0,
        )
        for key in sorted(found.keys() | documents.keys())
    ]


def _is_lossless(codec: str) -> bool:
    """Whether a codec loses nothing. False for one of a newer version, of which nothing is known."""
    try:
        return codec_named(codec).lossless
    except OptionError:
        return False


def _record(row: Sequence[Any]) -> ChunkRecord:
    return ChunkRecord(*row)
