"""A chunk that another process gives up while a document that has it, too, is being listed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.corpus import precompute
from semkv_rag.store import KVStore
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine


def test_it_is_computed_again(
    docs: Path, store: KVStore, engine: MadeUpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, given_up = KVStore.put_source, []

    def put_source(
        self: KVStore, model: str, namespace: str, name: str, digest: str, ids: Sequence[str]
    ) -> Any:
        if not given_up:  # the other process's document is changed just before
            given_up.append(ids[0])
            self.remove(model, namespace, given_up)
        return put(self, model, namespace, name, digest, ids)

    monkeypatch.setattr(KVStore, "put_source", put_source)
    result = precompute(engine, [docs], chunk_tokens=8, context=["prefix"])
    assert (result.changed, result.failures) == (2, [])
    assert [item.id for item in engine.captured].count(given_up[0]) == 2
    for source in store.sources():
        assert set(store.get(FINGERPRINT, "default", source.chunk_ids)) == set(source.chunk_ids)
