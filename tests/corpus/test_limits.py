"""Precompute keeps to the store's limits, and computes nothing that would not stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv_rag.corpus import PrecomputeResult, precompute
from semkv_rag.store import KVStore, Limit, Pin
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine

DOCUMENTS = 6


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Documents of two chunks of eight tokens each, none shared."""
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(DOCUMENTS):
        words = [f"w{20 * number + word}" for word in range(14)]
        text = " ".join([*words[:7], ".", *words[7:], "."])
        (folder / f"{number}.txt").write_text(text)
    return folder


def run(engine: MadeUpEngine, *paths: Path) -> PrecomputeResult:
    return precompute(engine, paths, chunk_tokens=8, context=["prefix"])


def names(store: KVStore) -> list[str]:
    """The documents whose chunks are all there."""
    return [
        source.name
        for source in store.sources()
        if store.get(FINGERPRINT, "default", source.chunk_ids).keys() == set(source.chunk_ids)
    ]


def size(store: KVStore) -> int:
    return sum(entry.bytes for entry in store.stats())


def test_the_longest_unused_make_room(tmp_path: Path, docs: Path) -> None:
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        run(engine, docs / "0.txt", docs / "1.txt")
        one = size(store) // 2
        store.lifecycle.set_limit(Limit(None, max_bytes=3 * one))
        store.lifecycle.pin(Pin(namespace="default", source="0.txt"))
        assert run(engine, docs / "2.txt", docs / "3.txt").failures == []
        assert names(store) == ["0.txt", "2.txt", "3.txt"], "the pinned one stayed"
        assert size(store) <= 3 * one


def test_a_document_that_comes_in_parts_makes_no_room_for_itself(
    tmp_path: Path, docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second part comes when others were used since its first one."""
    monkeypatch.setattr("semkv_rag.corpus.run._COMMIT_SECONDS", 0.0)
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        run(engine, docs / "0.txt", docs / "1.txt")
        others = [chunk.id for chunk in store.chunks()]
        store.lifecycle.set_limit(Limit(None, max_bytes=size(store)))
        engine.before_write = lambda: store.touch(others)
        assert run(engine, docs / "2.txt").failures == []
        assert "2.txt" in names(store)
        assert len(engine.captured) == 6, "nothing was computed twice"


@pytest.mark.slow
def test_what_does_not_fit_is_not_computed(tmp_path: Path, docs: Path) -> None:
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        run(engine, docs)
        one = size(store) // DOCUMENTS
        engine.kv_bytes_per_token = -(-one // 16)
        for source in store.sources()[1:]:
            store.remove_source(FINGERPRINT, "default", source.name)
        engine.captured.clear()
        store.lifecycle.set_limit(Limit("default", max_bytes=4 * one + one // 2))
        result = run(engine, docs)
        assert names(store) == [f"docs/{number}.txt" for number in range(4)]
        assert [failure.source for failure in result.failures] == ["docs/4.txt", "docs/5.txt"]
        assert all("(semkv limit)" in failure.reason for failure in result.failures)
        assert len(engine.captured) == 6, "nothing was computed in vain"

        again = run(engine, docs)
        assert (again.unchanged, len(again.failures)) == (4, 2)
        assert len(engine.captured) == 6
        assert names(store) == [f"docs/{number}.txt" for number in range(4)]


def test_what_takes_more_than_the_model_said_is_refused_in_words(
    tmp_path: Path, docs: Path
) -> None:
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)  # its rate has no headers in it, which are most of these files
        run(engine, docs / "0.txt")
        most = 4 * size(store) + 100
        store.lifecycle.set_limit(Limit("default", max_bytes=most))
        result = run(engine, docs)
        assert size(store) <= most
        assert result.changed + len(result.failures) == DOCUMENTS
        assert result.changed >= 2
        assert all("semkv limit --namespace default" in f.reason for f in result.failures)
        assert store.verify().notices == ()


def test_what_is_pinned_meanwhile_refuses_in_words(tmp_path: Path, docs: Path) -> None:
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        run(engine, docs / "0.txt")
        one = size(store)
        store.lifecycle.set_limit(Limit(None, max_bytes=one + 10))

        def pin() -> None:
            store.lifecycle.pin(Pin(namespace="default"))

        engine.before_write = pin
        result = run(engine, docs / "1.txt")
        (failure,) = result.failures
        assert "semkv unpin" in failure.reason
        assert names(store) == ["0.txt"]
        assert store.verify().notices == ()


def test_a_run_that_names_a_document_counts_as_use(tmp_path: Path, docs: Path) -> None:
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        run(engine, docs)
        (first, *_) = store.chunks()
        assert run(engine, docs).unchanged == DOCUMENTS
        assert store.get(FINGERPRINT, "default", [first.id])[first.id].used_at == first.used_at
        store.lifecycle.set_limit(Limit("default", ttl_s=3600.0))
        assert run(engine, docs).unchanged == DOCUMENTS
        assert store.get(FINGERPRINT, "default", [first.id])[first.id].used_at > first.used_at
