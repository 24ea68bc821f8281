"""Documents that are gone."""

from __future__ import annotations

from collections.abc import Iterable

from semkv_rag.store import KVStore

AT_ONCE = 64
"""Sources that are removed in one transaction: other writers wait for it."""


def forget_sources(store: KVStore, model: str, namespace: str, names: Iterable[str]) -> int:
    """Remove sources and the chunks that no other source has; how many sources were there.

    Raises:
        StoreError: the store cannot be written.
    """
    asked = list(names)
    return sum(
        store.remove_sources(model, namespace, asked[first : first + AT_ONCE])[0]
        for first in range(0, len(asked), AT_ONCE)
    )
