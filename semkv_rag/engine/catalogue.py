"""The catalogue: the stored chunks of one model, ready to be matched, kept up with the store.

It lives in the scheduler's process. The store's change feed is asked at every request, so that a
chunk that another process has just stored is found by the next prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby

from semkv_rag.engine.touching import Touches
from semkv_rag.reuse import ChunkIndex, Span, StoredTokens, TokenArray
from semkv_rag.store import KVStore

LOADED_AT_ONCE = 1000


class Catalogue:
    """Finds one model's stored chunks in prompts. Not thread safe: the scheduler has one thread.

    Args:
        model: the fingerprint whose chunks are looked for.
    """

    def __init__(self, store: KVStore, model: str) -> None:
        self._store = store
        self._model = model
        self._seen = 0
        self._indexes: dict[str, ChunkIndex] = {}
        self._touches = Touches(store.touch)

    def close(self) -> None:
        """Write down what was used, and stop."""
        self._touches.close()

    def match(self, namespace: str, prompt: TokenArray) -> list[Span]:
        """The namespace's chunks in `prompt`, in prompt order, none overlapping another.

        Raises:
            StoreError: the store's index cannot be read.
        """
        self.refresh()
        index = self._indexes.get(namespace)
        spans = index.match(prompt) if index is not None else []
        self._touches.note(span.chunk_id for span in spans)
        return spans

    def refresh(self) -> None:
        """Take in what was stored and removed since the last call.

        Raises:
            StoreError: the store's index cannot be read.
        """
        changes = self._store.changes(self._model, self._seen)
        if changes.reset:
            self._indexes.clear()
        for (namespace, added), group in groupby(
            changes.entries, key=lambda change: (change.namespace, change.added)
        ):
            ids = [change.chunk_id for change in group]
            if added:
                self._add(namespace, ids)
            else:
                self.forget(namespace, ids)
        self._seen = changes.last

    def forget(self, namespace: str, ids: Iterable[str]) -> None:
        """Match these chunks no more, because they are gone or their files are bad."""
        if namespace in self._indexes:
            self._indexes[namespace].remove(ids)

    def __len__(self) -> int:
        return sum(len(index) for index in self._indexes.values())

    def _add(self, namespace: str, ids: Sequence[str]) -> None:
        if namespace not in self._indexes:
            read = partial(self._store.tokens, self._model, namespace)
            self._indexes[namespace] = ChunkIndex(read)
        for first in range(0, len(ids), LOADED_AT_ONCE):
            stored: Mapping[str, StoredTokens] = self._store.tokens(
                self._model, namespace, ids[first : first + LOADED_AT_ONCE]
            )
            self._indexes[namespace].add((id, chunk.tokens) for id, chunk in stored.items())
