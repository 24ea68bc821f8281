"""Documents that are gone."""

from __future__ import annotations

from collections.abc import Iterable

from semkv_rag.store import KVStore


def forget_sources(store: KVStore, model: str, namespace: str, names: Iterable[str]) -> int:
    """Remove sources and the chunks that no other source has; how many sources were there.

    Raises:
        StoreError: the store cannot be written.
    """
    there = [name for name in names if store.source(model, namespace, name) is not None]
    for name in there:
        store.remove_source(model, namespace, name)
    return len(there)
