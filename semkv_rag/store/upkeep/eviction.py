"""Eviction by bytes. Called after precompute and capture, by whoever was given a limit."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import merge

from sqlalchemy import Connection

from semkv_rag.store.gone import GoneFile, unlink
from semkv_rag.store.index import chunks, states
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.records import ChunkRecord, StateRecord
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents

STATE = "state"
"""What eviction calls images' features, beside the chunks' kinds."""


def evict(
    database: Database,
    contents: Contents,
    stored_states: StoredStates,
    max_bytes: int,
    namespace: str | None,
    kind: str | None = None,
) -> list[str]:
    """Remove the least recently used chunks and states until `max_bytes` are left; their ids.

    In short transactions, and what is over is counted anew in each: others add and evict meanwhile.
    """
    with_chunks, with_states = kind != STATE, kind in (None, STATE)

    def drop_oldest(connection: Connection) -> tuple[list[str], list[GoneFile]]:
        over = -max_bytes
        oldest: list[Sequence[ChunkRecord | StateRecord]] = []
        if with_chunks:
            over += chunks.total_bytes(connection, namespace, kind)
            oldest.append(chunks.least_recently_used(connection, namespace, kind, FREED))
        if with_states:
            over += states.total_bytes(connection, namespace)
            oldest.append(states.least_recently_used(connection, namespace, FREED))
        victims: list[ChunkRecord | StateRecord] = []
        for record in merge(*oldest, key=lambda record: record.used_at):
            if over <= 0 or len(victims) == FREED:
                break
            victims.append(record)
            over -= record.bytes
        gone = contents.drop(connection, [v for v in victims if isinstance(v, ChunkRecord)])
        gone += stored_states.drop(connection, [v for v in victims if isinstance(v, StateRecord)])
        return [record.id for record in victims], gone

    evicted: list[str] = []
    while True:
        ids, gone = database.freeing(drop_oldest)
        unlink(database, contents.root, gone)
        if not ids:
            return evicted
        evicted += ids
