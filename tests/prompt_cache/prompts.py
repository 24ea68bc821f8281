"""Stored prompts of a made-up model."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semkv_rag.prompt_cache import Cascade
from semkv_rag.store import KVStore, chunk_id
from tests.store import made


def tokens(text: str) -> NDArray[np.int32]:
    """One token a word, by its letters: other case and white space are other tokens."""
    words = text.replace(" ", " \0").split("\0")
    return np.array(
        [int.from_bytes(hashlib.sha256(word.encode()).digest()[:3], "big") for word in words],
        dtype=np.int32,
    )


def put_kv(store: KVStore, text: str, namespace: str = "default") -> str:
    """Store a prompt's KV, as a capture does; its chunk id."""
    ids = tokens(text)
    nothing = np.empty(0, np.int32)
    header = replace(
        made.header(0, namespace=namespace, context=0),
        id=chunk_id(made.MODEL, namespace, nothing, ids),
        kind="prompt",
        tokens=ids,
    )
    store.add([made.write(store, header)])
    return header.id


def observe(cascade: Cascade, store: KVStore, text: str, **options: Any) -> str:
    """Store a prompt's KV and make it a donor; its chunk id."""
    id_ = put_kv(store, text, options.get("namespace", "default"))
    assert cascade.observe(text, tokens(text), **options)
    return id_
