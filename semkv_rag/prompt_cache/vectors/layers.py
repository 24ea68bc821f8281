"""The vectors of every namespace and layer of one model, kept up with the store.

The store is asked before each search; nothing new is one row to read.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from itertools import groupby
from operator import itemgetter

import numpy as np

from semkv_rag.errors import OptionError
from semkv_rag.prompt_cache.vectors.index import VectorIndex, Vectors
from semkv_rag.store import KVStore, VectorKey

_LOADED_AT_ONCE = 1000


class LayerIndexes:
    """Searches one model's stored prompts; safe for threads.

    Args:
        keys: the layers, each with the encoder whose vectors count.
    """

    def __init__(self, store: KVStore, model: str, keys: Collection[VectorKey]) -> None:
        self._store = store
        self._model = model
        self._keys = tuple(keys)
        self._seen = 0
        self._indexes: dict[tuple[str, VectorKey], VectorIndex] = {}
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Take in what was stored and removed since the last call, by any process.

        Raises:
            StoreError: the store's index cannot be read.
            MissingExtraError: FAISS is not installed.
        """
        with self._lock:
            changes = self._store.prompts.vector_changes(self._model, self._keys, self._seen)
            if changes.reset:
                self._clear()
            for namespace, id_ in changes.removed:
                for key in self._keys:
                    if (index := self._indexes.get((namespace, key))) is not None:
                        index.remove([id_])
            for (namespace, key), group in groupby(changes.added, key=itemgetter(0, 1)):
                ids = [entry[2] for entry in group]
                for first in range(0, len(ids), _LOADED_AT_ONCE):
                    self._load(namespace, key, ids[first : first + _LOADED_AT_ONCE])
            self._seen = changes.last

    def search(
        self, namespace: str, key: VectorKey, vector: Vectors, k: int
    ) -> list[tuple[str, float]]:
        """The `k` nearest prompts' ids, the most similar first, each with its similarity.

        Args:
            vector: [dim], of length 1.

        Raises:
            OptionError: the stored vectors have another length.
        """
        with self._lock:
            index = self._indexes.get((namespace, key))
        if index is None:
            return []
        if len(vector) != index.dim:
            raise OptionError(
                f"the encoder {key.encoder!r} of layer {key.layer!r} gives {len(vector)} numbers and"
                f" the stored vectors have {index.dim}: give it another name"
            )
        return index.search(vector, k)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(index) for index in self._indexes.values())

    def close(self) -> None:
        """Stop what is under way."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        for index in self._indexes.values():
            index.close()
        self._indexes = {}

    def _load(self, namespace: str, key: VectorKey, ids: Sequence[str]) -> None:
        """Read vectors; those that went meanwhile are left out, and their going is told next time."""
        found = self._store.prompts.vectors(self._model, namespace, key, ids)
        if not found:
            return
        own = (namespace, key)
        if own not in self._indexes:
            self._indexes[own] = VectorIndex(len(next(iter(found.values()))))
        index = self._indexes[own]
        fitting = {id_: vector for id_, vector in found.items() if len(vector) == index.dim}
        if fitting:
            index.add(list(fitting), np.stack(list(fitting.values())))
