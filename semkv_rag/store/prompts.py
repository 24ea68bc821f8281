"""What is known of the chunks that are whole prompts: their texts, vectors and outcomes.

Asked by the tiers at each request and written after it, by any number of processes. The KV itself is
the chunk's; all of this goes when the chunk goes. It stands only in the index: when that was lost, a
prompt's KV is still found by its tokens, and its text and vectors come back when it is stored again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from semkv_rag.store.index import chunks, feed, prompts
from semkv_rag.store.index.database import Database
from semkv_rag.store.records import PromptRecord, StoredOutcome, VectorChanges, VectorKey

SIGHTING_SECONDS = 7 * 24 * 3600.0
"""How long a prompt that was seen but not stored is remembered."""


class StoredPrompts:
    """The prompts of one store; every method raises StoreError as the store's own do."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def put(
        self,
        record: PromptRecord,
        vectors: Mapping[VectorKey, NDArray[np.float32]] | None = None,
    ) -> bool:
        """Say what a stored chunk is the KV of; False when the chunk is not stored.

        Args:
            record: takes the place of what was known of the chunk, except for its vectors.
            vectors: [dim] float32 each; in place of those of the same layer and encoder.
        """
        with self._database.writing() as connection:
            if not prompts.put(connection, record):
                return False
            if vectors:
                seq = feed.advance(connection)
                prompts.put_vectors(connection, record.id, vectors, seq)
        return True

    def get(self, model: str, namespace: str, ids: Iterable[str]) -> dict[str, PromptRecord]:
        """The prompts among `ids`."""
        with self._database.reading() as connection:
            return {
                record.id: record
                for piece in chunks.pieces(ids)
                for record in prompts.find(connection, model, namespace, piece)
            }

    def with_key(self, model: str, namespace: str, key: str) -> list[PromptRecord]:
        """The prompts whose normalised text and images have this digest, the newest first."""
        with self._database.reading() as connection:
            return prompts.with_key(connection, model, namespace, key)

    def vector_changes(self, model: str, keys: Collection[VectorKey], since: int) -> VectorChanges:
        """Which vectors of these layers and encoders came and went after `since`.

        When nothing did, that is one row to read. From 0 it tells all, and so it does, with `reset`
        set, to a caller who is too far behind or whose index was replaced.
        """
        with self._database.reading() as connection:
            last, gone = feed.removed(connection, model, since)
            if since == last or not keys:
                return VectorChanges(last, [], [])
            added = prompts.vectors_since(connection, model, keys, None if gone is None else since)
        if gone is None:
            return VectorChanges(last, [], added, reset=True)
        return VectorChanges(last, [(change.namespace, change.chunk_id) for change in gone], added)

    def vectors(
        self, model: str, namespace: str, key: VectorKey, ids: Iterable[str]
    ) -> dict[str, NDArray[np.float32]]:
        """The vectors of those of `ids` that have one of this layer and encoder, [dim] each."""
        with self._database.reading() as connection:
            return {
                id_: vector
                for piece in chunks.pieces(ids)
                for id_, vector in prompts.vectors(connection, model, namespace, key, piece)
            }

    def add_outcome(
        self,
        model: str,
        namespace: str,
        chunk_id: str,
        key: VectorKey,
        *,
        similarity: float,
        correct: bool,
    ) -> bool:
        """Note what came of a request that the prompt might have answered; False when it is gone."""
        outcome = StoredOutcome(similarity, correct, time.time())
        with self._database.writing() as connection:
            return prompts.add_outcome(connection, model, namespace, chunk_id, key, outcome)

    def outcomes(
        self, model: str, namespace: str, chunk_id: str, key: VectorKey
    ) -> Sequence[StoredOutcome]:
        """All outcomes of a prompt under one layer and encoder, oldest first."""
        with self._database.reading() as connection:
            return prompts.outcomes_of(connection, model, namespace, chunk_id, key)

    def count_sighting(self, model: str, namespace: str, key: str) -> int:
        """Count a prompt that is not stored; how often it was seen within the last week or so.

        Raises:
            StoreError: others wrote for long (`sqlite.LAZY_S`): it is not counted, nothing else.
        """
        with self._database.writing(durable=False) as connection:
            forget_before = time.time() - SIGHTING_SECONDS
            return prompts.count_sighting(connection, model, namespace, key, forget_before)
