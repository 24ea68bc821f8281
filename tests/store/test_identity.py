"""A store's own name: the same for everybody who asks, another one for another store."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from semkv_rag.store import KVStore
from semkv_rag.store.identity import store_identity


def test_all_who_ask_at_once_are_told_the_same(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv") as store, ThreadPoolExecutor(8) as pool:
        names = set(pool.map(lambda _: store_identity(store.root), range(64)))
        assert len(names) == 1
        assert [path.name for path in store.root.glob(".store.id*")] == []
    with KVStore(tmp_path / "kv", read_only=True) as store:
        assert {store_identity(store.root)} == names


def test_a_store_that_was_made_anew_has_another(tmp_path: Path) -> None:
    with KVStore(tmp_path / "kv") as store:
        first = store_identity(store.root)
    (tmp_path / "kv").rename(tmp_path / "moved")
    with KVStore(tmp_path / "moved") as store:
        assert store_identity(store.root) == first
    shutil.rmtree(tmp_path / "moved")
    with KVStore(tmp_path / "moved") as store:
        assert store_identity(store.root) != first
