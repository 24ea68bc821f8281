"""What the keys of others' caches hold of a store, so that they are dropped when it changes."""

from __future__ import annotations

import json

from blake3 import blake3

from semkv_rag.store.identity import store_identity
from semkv_rag.store.kv_store import KVStore


def cache_key(store: KVStore, model: str, namespace: str) -> str:
    """32 hex digits: others after every chunk of the namespace that came or went, and in another store.

    What was stored when a cache saw it may have gone since. A digest: the numbers themselves would
    tell one tenant how much the others store.
    """
    change = store.last_change(model, namespace)
    told = json.dumps([_name(store), namespace, change])
    return blake3(told.encode()).hexdigest(16)


def _name(store: KVStore) -> str:
    """What all processes call a store, and no other store is called."""
    objects = store.place.objects
    if objects is None:
        return store_identity(store.root)
    return blake3(objects.url.encode()).hexdigest(16)
