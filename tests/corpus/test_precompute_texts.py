"""Texts that a framework cut itself take the same way into the store as files do."""

from semkv_rag.corpus import precompute_texts
from semkv_rag.corpus.run import digest_of
from semkv_rag.store import KVStore
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine


def test_texts_are_chunks_as_they_are(engine: MadeUpEngine, store: KVStore) -> None:
    result = precompute_texts(
        engine, [("one", ["w1 w2 w3", "w4"]), ("two", ["w4"])], prefix="w0", context=["prefix"]
    )
    assert (result.documents, result.changed, result.chunks_captured) == (2, 2, 3)
    source = store.source(FINGERPRINT, "default", "one")
    assert source is not None
    stored = store.tokens(FINGERPRINT, "default", source.chunk_ids)
    assert [engine.tokenizer.decode(stored[id_].tokens) for id_ in source.chunk_ids] == [
        "<s> w0",
        "w1 w2 w3",
        "w4",
    ]


def test_only_other_texts_are_computed(engine: MadeUpEngine, store: KVStore) -> None:
    precompute_texts(engine, [("one", ["w1", "w2"])], context=["prefix"])
    assert precompute_texts(engine, [("one", ["w1", "w2"])], context=["prefix"]).unchanged == 1
    result = precompute_texts(engine, [("one", ["w1", "w3"])], context=["prefix"])
    assert (result.changed, result.chunks_captured, result.chunks_reused) == (1, 1, 1)
    assert len(list(store.chunks())) == 2, "w2 is nobody's any more"
    # Cut elsewhere, the same text is another document.
    assert precompute_texts(engine, [("one", ["w1 w3"])]).changed == 1


def test_the_digest_of_a_stored_source_stays_what_it_was(
    engine: MadeUpEngine, store: KVStore
) -> None:
    precompute_texts(engine, [("one", ["w1", "w2"])], prefix="w0")
    source = store.source(FINGERPRINT, "default", "one")
    assert source is not None
    assert source.digest == digest_of(FINGERPRINT, "w0", ("head", "left"), "w1", "w2")
