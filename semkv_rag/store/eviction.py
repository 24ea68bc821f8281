"""Eviction by bytes. Called after precompute and capture, by whoever was given a limit."""

from __future__ import annotations

from semkv_rag.store.contents import BATCH, Contents
from semkv_rag.store.index import chunks
from semkv_rag.store.index.database import Database


def evict(
    database: Database,
    contents: Contents,
    max_bytes: int,
    namespace: str | None,
    kind: str | None = None,
) -> list[str]:
    """Remove the least recently used chunks until `max_bytes` are left; their ids.

    In short transactions, and what is over is counted anew in each: others add and evict meanwhile.
    """
    evicted: list[str] = []
    while True:
        with database.writing() as connection:
            over = chunks.total_bytes(connection, namespace, kind) - max_bytes
            victims = []
            for record in chunks.least_recently_used(connection, namespace, kind, BATCH):
                if over <= 0:
                    break
                victims.append(record)
                over -= record.bytes
            gone = contents.drop(connection, victims)
        contents.unlink(gone)
        if not victims:
            return evicted
        evicted += [record.id for record in victims]
