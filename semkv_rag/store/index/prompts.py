"""Statements about whole prompts: texts, vectors, outcomes, sightings.

A prompt's row belongs to its chunk's, and vectors and outcomes to the prompt's: `drop` is called with
every chunk that goes, inside the same transaction. Lists of ids are no longer than what one statement
takes (`chunks.pieces`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Connection, and_, delete, insert, or_, select, update

from semkv_rag.store.index.schema import chunks, embeddings, outcomes, prompts, sightings
from semkv_rag.store.index.send import send
from semkv_rag.store.records import PromptRecord, StoredOutcome, VectorKey

_RECORD = select(
    prompts.c.chunk_id,
    prompts.c.model,
    prompts.c.namespace,
    prompts.c.key,
    prompts.c.text,
    prompts.c.images,
    prompts.c.source_version,
    prompts.c.created_at,
)


def _belongs_to(model: str, namespace: str) -> ColumnElement[bool]:
    return and_(prompts.c.model == model, prompts.c.namespace == namespace)


def put(connection: Connection, record: PromptRecord) -> bool:
    """Write a prompt's row in place of the one it had; False when its chunk is not promised."""
    promised = select(chunks.c.id).where(
        chunks.c.id == record.id,
        chunks.c.model == record.model,
        chunks.c.namespace == record.namespace,
    )
    if connection.execute(promised).first() is None:
        return False
    values = {
        "key": record.key,
        "text": record.text,
        "images": record.images,
        "source_version": record.source_version,
    }
    changed = update(prompts).where(prompts.c.chunk_id == record.id).values(values)
    if connection.execute(changed).rowcount == 0:
        own = {"chunk_id": record.id, "model": record.model, "namespace": record.namespace}
        connection.execute(insert(prompts), {**own, **values, "created_at": record.created_at})
    return True


def put_vectors(
    connection: Connection,
    chunk_id: str,
    vectors: Mapping[VectorKey, NDArray[np.float32]],
    seq: int,
) -> None:
    """Write a prompt's vectors in place of those of the same layers and encoders."""
    for key in vectors:
        connection.execute(
            delete(embeddings).where(
                embeddings.c.chunk_id == chunk_id,
                embeddings.c.layer == key.layer,
                embeddings.c.encoder == key.encoder,
            )
        )
    rows = [
        {
            "chunk_id": chunk_id,
            "layer": key.layer,
            "encoder": key.encoder,
            "seq": seq,
            "vector": np.ascontiguousarray(vector, "<f4").tobytes(),
        }
        for key, vector in vectors.items()
    ]
    if rows:
        connection.execute(insert(embeddings), rows)


def drop(connection: Connection, ids: Collection[str]) -> None:
    """Forget what is known of chunks as prompts."""
    send(connection, delete(outcomes).where(outcomes.c.chunk_id.in_(ids)))
    send(connection, delete(embeddings).where(embeddings.c.chunk_id.in_(ids)))
    send(connection, delete(prompts).where(prompts.c.chunk_id.in_(ids)))


def find(
    connection: Connection, model: str, namespace: str, ids: Collection[str]
) -> list[PromptRecord]:
    """The prompts among `ids`, in no order."""
    found = _RECORD.where(prompts.c.chunk_id.in_(ids), _belongs_to(model, namespace))
    return [PromptRecord(*row) for row in connection.execute(found)]


def with_key(connection: Connection, model: str, namespace: str, key: str) -> list[PromptRecord]:
    """The prompts of a key, the newest first."""
    found = _RECORD.where(prompts.c.key == key, _belongs_to(model, namespace))
    rows = connection.execute(found.order_by(prompts.c.created_at.desc(), prompts.c.chunk_id))
    return [PromptRecord(*row) for row in rows]


def vectors_since(
    connection: Connection, model: str, keys: Collection[VectorKey], since: int | None
) -> list[tuple[str, VectorKey, str]]:
    """Namespace, layer and encoder, and chunk of the vectors written after `since`; None: of all."""
    wanted = or_(
        *(
            and_(embeddings.c.layer == key.layer, embeddings.c.encoder == key.encoder)
            for key in keys
        )
    )
    found = (
        select(prompts.c.namespace, embeddings.c.layer, embeddings.c.encoder, embeddings.c.chunk_id)
        .join(prompts, prompts.c.chunk_id == embeddings.c.chunk_id)
        .where(prompts.c.model == model, wanted)
        .order_by(embeddings.c.seq)
    )
    if since is not None:
        found = found.where(embeddings.c.seq > since)
    rows = connection.execute(found)
    return [(row[0], VectorKey(row[1], row[2]), row[3]) for row in rows]


def vectors(
    connection: Connection, model: str, namespace: str, key: VectorKey, ids: Collection[str]
) -> list[tuple[str, NDArray[np.float32]]]:
    """The vectors of those of `ids` that have one, [dim] each."""
    found = (
        select(embeddings.c.chunk_id, embeddings.c.vector)
        .join(prompts, prompts.c.chunk_id == embeddings.c.chunk_id)
        .where(
            embeddings.c.chunk_id.in_(ids),
            embeddings.c.layer == key.layer,
            embeddings.c.encoder == key.encoder,
            _belongs_to(model, namespace),
        )
    )
    return [(row[0], np.frombuffer(row[1], "<f4")) for row in connection.execute(found)]


def add_outcome(
    connection: Connection,
    model: str,
    namespace: str,
    chunk_id: str,
    key: VectorKey,
    outcome: StoredOutcome,
) -> bool:
    """Write what came of an explored request; False when the prompt is not there any more."""
    there = select(prompts.c.chunk_id).where(
        prompts.c.chunk_id == chunk_id, _belongs_to(model, namespace)
    )
    if connection.execute(there).first() is None:
        return False
    row = {
        "chunk_id": chunk_id,
        "layer": key.layer,
        "encoder": key.encoder,
        "similarity": outcome.similarity,
        "correct": outcome.correct,
        "at": outcome.at,
    }
    connection.execute(insert(outcomes), row)
    return True


def outcomes_of(
    connection: Connection, model: str, namespace: str, chunk_id: str, key: VectorKey
) -> list[StoredOutcome]:
    """All outcomes of a prompt under one layer and encoder, oldest first."""
    found = (
        select(outcomes.c.similarity, outcomes.c.correct, outcomes.c.at)
        .join(prompts, prompts.c.chunk_id == outcomes.c.chunk_id)
        .where(
            outcomes.c.chunk_id == chunk_id,
            outcomes.c.layer == key.layer,
            outcomes.c.encoder == key.encoder,
            _belongs_to(model, namespace),
        )
        .order_by(outcomes.c.id)
    )
    return [StoredOutcome(*row) for row in connection.execute(found)]


def count_sighting(
    connection: Connection, model: str, namespace: str, key: str, forget_before: float
) -> int:
    """Count a prompt; how often it was seen. Prompts last seen before `forget_before` are forgotten."""
    connection.execute(delete(sightings).where(sightings.c.seen_at < forget_before))
    own = {"model": model, "namespace": namespace, "key": key}
    count = connection.scalar(select(sightings.c.count).filter_by(**own))
    seen = (count or 0) + 1
    values = {"count": seen, "seen_at": time.time()}
    if count is None:
        connection.execute(insert(sightings), {**own, **values})
    else:
        connection.execute(update(sightings).filter_by(**own).values(values))
    return seen


def forget_sightings(connection: Connection, model: str | None, namespace: str | None) -> None:
    """Forget the prompts of a model and a namespace that were seen and not stored; None is any."""
    forgotten = delete(sightings)
    if model is not None:
        forgotten = forgotten.where(sightings.c.model == model)
    if namespace is not None:
        forgotten = forgotten.where(sightings.c.namespace == namespace)
    connection.execute(forgotten)
