"""What a run computes, keeps and removes, over a real store."""

from pathlib import Path

import pytest

from semkv_rag.corpus import (
    CaptureItem,
    Capturer,
    LazyCapturer,
    PrecomputeProgress,
    PrecomputeResult,
    precompute,
)
from semkv_rag.errors import CorpusError, EngineError, OptionError
from semkv_rag.store import KVStore
from tests.corpus.conftest import sentence
from tests.corpus.made_up_engine import BOS, FINGERPRINT, MadeUpEngine


def run(engine: Capturer, *paths: Path, **options: object) -> PrecomputeResult:
    return precompute(engine, paths, **{"chunk_tokens": 8, "context": ("prefix",), **options})  # type: ignore[arg-type]


def chunk_texts(store: KVStore, engine: MadeUpEngine, name: str) -> list[str]:
    """The texts of a source's chunks, in its order, as the store has them."""
    source = store.source(FINGERPRINT, "default", name)
    assert source is not None
    tokens = store.tokens(FINGERPRINT, "default", source.chunk_ids)
    return [engine.tokenizer.decode(tokens[id_].tokens) for id_ in source.chunk_ids]


def test_documents_are_stored_chunk_by_chunk(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    result = run(engine, docs)
    assert (result.documents, result.changed, result.unchanged) == (2, 2, 0)
    assert result.chunks_captured == 5, "the sentence both have is computed once"
    assert result.chunks_reused == 1
    assert result.tokens == 40
    assert result.bytes == sum(one.bytes for one in store.stats())
    assert result.failures == []
    assert chunk_texts(store, engine, "docs/a.txt") == [sentence(1), sentence(0), sentence(2)]
    assert chunk_texts(store, engine, "docs/b.txt") == [sentence(3), sentence(0), sentence(4)]
    assert store.verify().ok


def test_chunks_stand_behind_what_every_prompt_starts_with(
    docs: Path, engine: MadeUpEngine
) -> None:
    run(engine, docs)
    assert {tuple(item.context) for item in engine.captured} == {(BOS,)}
    assert {item.kind for item in engine.captured} == {"document"}
    assert not any(BOS in item.tokens for item in engine.captured)


def test_a_prompt_prefix_is_the_chunks_context_and_a_chunk_itself(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    prefix = tuple(engine.tokenizer.encode("w9 w8 w7"))
    assert prefix[0] == BOS
    run(engine, docs, prefix="w9 w8 w7")
    (stored_prefix,) = [item for item in engine.captured if item.kind == "head"]
    assert tuple(stored_prefix.tokens) == prefix
    assert tuple(stored_prefix.context) == ()
    documents = [item for item in engine.captured if item.kind == "document"]
    assert {tuple(item.context) for item in documents} == {prefix}

    run(engine, docs, prefix="w6")
    kinds = [record.kind for record in store.chunks()]
    assert kinds.count("head") == 1, "the old prefix went with the last document behind it"
    assert len(kinds) == 6


def test_unchanged_documents_cost_nothing(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    run(engine, docs)

    def start() -> Capturer:
        raise AssertionError("the engine was started")

    lazy = LazyCapturer(store, fingerprint=lambda: FINGERPRINT, start=start)
    result = run(lazy, docs)
    assert (result.unchanged, result.changed) == (2, 0)
    assert (result.chunks_captured, result.chunks_reused, result.tokens) == (0, 0, 0)


def test_the_engine_is_started_once_and_must_be_the_one_asked_about(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    started = []

    def start() -> Capturer:
        started.append(1)
        return engine

    assert run(LazyCapturer(store, fingerprint=lambda: FINGERPRINT, start=start), docs).changed == 2
    assert started == [1]
    with pytest.raises(EngineError, match="runs as model abab"):
        run(LazyCapturer(store, fingerprint=lambda: "cd" * 32, start=start), docs)


def test_a_changed_document_replaces_just_its_own_chunks(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    run(engine, docs)
    engine.captured.clear()
    (docs / "a.txt").write_text(f"{sentence(1)} {sentence(9)} {sentence(2)}")
    result = run(engine, docs)
    assert engine.texts() == [sentence(9)]
    assert (result.changed, result.unchanged, result.chunks_reused) == (1, 1, 2)
    assert chunk_texts(store, engine, "docs/a.txt") == [sentence(1), sentence(9), sentence(2)]
    assert chunk_texts(store, engine, "docs/b.txt")[1] == sentence(0), "b has it still"

    (docs / "b.txt").write_text(sentence(3))
    run(engine, docs)
    left = {tuple(t.tokens) for t in _all_tokens(store).values()}
    assert tuple(engine.tokenizer.encode(sentence(0), add_special_tokens=False)) not in left
    assert len(left) == 4
    assert store.verify().ok


def _all_tokens(store: KVStore) -> dict[str, object]:
    return store.tokens(FINGERPRINT, "default", [record.id for record in store.chunks()])


@pytest.mark.parametrize(
    "change", [{"chunk_tokens": 16}, {"overlap": 4}, {"prefix": "w1"}, {"context": ("left",)}]
)
def test_other_parameters_make_other_chunks(
    docs: Path, engine: MadeUpEngine, change: dict[str, object]
) -> None:
    run(engine, docs)
    assert run(engine, docs, **change).changed == 2


def test_namespaces_are_apart(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    run(engine, docs, namespace="one")
    assert run(engine, docs, namespace="two").chunks_captured == 5
    (docs / "a.txt").unlink()
    run(engine, docs, namespace="two", sync=True)
    assert [source.name for source in store.sources(namespace="one")] == [
        "docs/a.txt",
        "docs/b.txt",
    ]
    assert [source.name for source in store.sources(namespace="two")] == ["docs/b.txt"]


def test_sync_removes_only_what_is_gone_from_the_given_folders(
    docs: Path, engine: MadeUpEngine, store: KVStore, tmp_path: Path
) -> None:
    other = tmp_path / "docs-2"
    other.mkdir()
    (other / "c.txt").write_text(sentence(60))
    run(engine, docs, other)
    (docs / "a.txt").unlink()
    (other / "c.txt").unlink()
    assert run(engine, docs).removed == 0
    assert run(engine, docs, sync=True).removed == 1
    assert [source.name for source in store.sources()] == ["docs-2/c.txt", "docs/b.txt"]
    assert sentence(0) in chunk_texts(store, engine, "docs/b.txt")
    assert len(list(store.chunks())) == 4


def test_a_renamed_document_is_not_computed_again(docs: Path, engine: MadeUpEngine) -> None:
    run(engine, docs)
    (docs / "a.txt").rename(docs / "z.txt")
    result = run(engine, docs, sync=True)
    assert (result.changed, result.removed, result.chunks_captured) == (1, 1, 0)


def test_documents_that_exchange_their_text_stay_whole(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    run(engine, docs)
    a, b = (docs / "a.txt").read_text(), (docs / "b.txt").read_text()
    (docs / "a.txt").write_text(b)
    (docs / "b.txt").write_text(a)
    assert run(engine, docs).changed == 2
    assert chunk_texts(store, engine, "docs/a.txt") == [sentence(3), sentence(0), sentence(4)]
    assert chunk_texts(store, engine, "docs/b.txt") == [sentence(1), sentence(0), sentence(2)]
    assert run(engine, docs).unchanged == 2


def test_a_broken_document_stops_nothing(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    (docs / "bad.pdf").write_bytes(b"%PDF-1.4 no")
    (docs / "picture.png").write_bytes(b"png")
    (docs / "empty.txt").write_text(" \n")
    result = run(engine, docs)
    assert [failure.source for failure in result.failures] == ["docs/bad.pdf"]
    assert result.skipped == ("docs/picture.png",)
    assert result.empty == ("docs/empty.txt",)
    assert (result.documents, result.changed) == (4, 3)
    again = run(engine, docs)
    assert (again.unchanged, again.empty) == (3, ("docs/empty.txt",))


def test_a_document_that_breaks_keeps_what_is_stored_of_it(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    run(engine, docs)
    (docs / "a.txt").write_bytes(b"\xff\xfe\x00")
    result = run(engine, docs, sync=True)
    assert (len(result.failures), result.removed) == (1, 0)
    assert len(chunk_texts(store, engine, "docs/a.txt")) == 3


def test_a_chunk_that_cannot_be_written_fails_its_documents_only(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    def full(item: CaptureItem) -> str | None:
        return "No space left" if engine.tokenizer.decode(item.tokens) == sentence(1) else None

    engine.refuse = full
    result = run(engine, docs)
    assert [(f.source, f.reason) for f in result.failures] == [("docs/a.txt", "No space left")]
    assert result.changed == 1
    assert store.source(FINGERPRINT, "default", "docs/a.txt") is None

    engine.refuse = lambda _: None
    result = run(engine, docs)
    assert (result.changed, result.chunks_captured) == (1, 1), "what was written was kept"


def test_evicted_chunks_are_computed_again(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    run(engine, docs)
    source = store.source(FINGERPRINT, "default", "docs/a.txt")
    assert source is not None
    store.remove(FINGERPRINT, "default", source.chunk_ids[:1])
    result = run(engine, docs)
    assert (result.changed, result.unchanged, result.chunks_captured) == (1, 1, 1)


def test_progress_tells_how_far_it_is(docs: Path, engine: MadeUpEngine) -> None:
    seen: list[PrecomputeProgress] = []
    result = run(engine, docs, on_progress=seen.append)
    reading = [state for state in seen if state.phase == "reading"]
    computing = [state for state in seen if state.phase == "computing"]
    assert [state.documents for state in reading] == [1, 2]
    shares = [state.share for state in computing]
    assert shares == sorted(shares)
    last = computing[-1]
    assert last.share == pytest.approx(1.0)
    assert (last.documents, last.documents_total) == (2, 2)
    assert (last.chunks, last.tokens, last.bytes) == (5, 40, result.bytes)


def test_what_makes_no_sense_is_refused_before_anything_is_read(
    docs: Path, engine: MadeUpEngine, tmp_path: Path
) -> None:
    with pytest.raises(OptionError):
        run(engine, docs, overlap=8)
    with pytest.raises(OptionError):
        run(engine, docs, namespace="")
    with pytest.raises(OptionError, match="'right': use prefix, left"):
        run(engine, docs, context=("prefix", "right"))
    with pytest.raises(OptionError, match="use one or more of"):
        run(engine, docs, context=())
    with pytest.raises(CorpusError):
        run(engine, tmp_path / "nowhere", sync=True)
    engine.store = None  # type: ignore[assignment]
    with pytest.raises(OptionError, match="without a store"):
        run(engine, docs)
