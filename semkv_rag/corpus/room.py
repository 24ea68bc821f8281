"""How much a precompute run may store, so that nothing is computed that would not stay.

Chunks that a run stores, or finds stored, count as used now. So other chunks go first where the store's
limits are reached, and a run never evicts what it has just computed. Chunks that do not fit beside that
are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from semkv_rag.errors import StoreError
from semkv_rag.store import ChunkRecord, KVStore

_TOUCHED = 1000
"""Chunks that are told to be used at a time."""


class Room:
    """What there is room for; asked before each document is computed.

    Args:
        max_bytes: what the whole store may become with this run; None for no bound but its own limits.
    """

    def __init__(self, store: KVStore, namespace: str, max_bytes: int | None) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._store_bytes = 0  # when computing began
        limits = store.lifecycle.limits()
        self._limited = any(limit.namespace in (None, namespace) for limit in limits)
        self._room = store.lifecycle.room(namespace) if self._limited else None
        self._kept: set[str] = set()
        self._kept_bytes = 0
        self._untold: list[str] = []

    def begin(self) -> None:
        """Computing begins."""
        self._tell()
        if self._max_bytes is not None:
            self._store_bytes = sum(one.bytes for one in self._store.stats())

    def keep(self, records: Iterable[ChunkRecord]) -> None:
        """The run's documents have these chunks already."""
        if not self._limited:
            return
        new = {record.id: record for record in records if record.id not in self._kept}
        self._kept |= new.keys()
        if self._room is not None:
            pinned = self._store.lifecycle.pinned(new)
            self._kept_bytes += sum(r.bytes for r in new.values() if r.id not in pinned)
        self._untold += new
        if len(self._untold) >= _TOUCHED:
            self._tell()

    def computing(self, ids: Iterable[str]) -> None:
        """The run computes these chunks: they are counted with what it enters."""
        if self._limited:
            self._kept.update(ids)

    def fault(self, new_bytes: int, entered_bytes: int) -> str | None:
        """Why a document cannot be stored, or None.

        Args:
            new_bytes: about what its chunks take that are not there.
            entered_bytes: what those of the documents before it take.
        """
        self._tell()
        there = self._store_bytes + entered_bytes
        if self._max_bytes is not None and there + new_bytes > self._max_bytes:
            return (
                f"its KV takes {new_bytes:,} bytes, and the store, with {there:,}, may have"
                f" {self._max_bytes:,} (max_bytes)"
            )
        own = self._kept_bytes + entered_bytes
        if self._room is not None and own + new_bytes > self._room:
            return (
                f"its KV takes {new_bytes:,} bytes, and the store's limits leave less beside what is"
                f" pinned and this run's other documents, {own:,} (semkv limit)"
            )
        return None

    def _tell(self) -> None:
        if self._untold:
            # Others write for long: then these go a little earlier than they should, if limits are met.
            with suppress(StoreError):
                self._store.touch(self._untold)
            self._untold.clear()
