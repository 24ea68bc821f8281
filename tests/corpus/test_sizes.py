"""How much a run would compute, and how large it may make the store."""

from pathlib import Path

import pytest

from semkv_rag.cli.options import size_in_bytes
from semkv_rag.corpus import precompute
from semkv_rag.corpus.progress import ToCompute
from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore
from tests.corpus.conftest import sentence
from tests.corpus.made_up_engine import MadeUpEngine


def test_a_dry_run_tells_what_a_run_does(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    for context in (["prefix"], ["prefix", "left"]):
        told = precompute(engine, [docs], chunk_tokens=8, context=context, dry_run=True).to_compute
        assert not engine.captured or context != ["prefix"]
        done = precompute(engine, [docs], chunk_tokens=8, context=context)
        assert told == ToCompute(2, done.chunks_captured, done.tokens, done.tokens * 16)
    again = precompute(engine, [docs], chunk_tokens=8, context=["prefix", "left"], dry_run=True)
    assert (again.unchanged, again.to_compute) == (2, ToCompute(0, 0, 0, 0))


def test_a_dry_run_removes_nothing(docs: Path, engine: MadeUpEngine, store: KVStore) -> None:
    precompute(engine, [docs], chunk_tokens=8)
    (docs / "a.txt").unlink()
    assert precompute(engine, [docs], chunk_tokens=8, sync=True, dry_run=True).removed == 0
    assert len(store.sources()) == 2


def test_a_store_does_not_become_larger_than_it_may(
    docs: Path, engine: MadeUpEngine, store: KVStore
) -> None:
    for number in range(50):
        (docs / f"more {number:02}.txt").write_text(sentence(number + 10))
    one = 8 * engine.kv_bytes_per_token
    few = precompute(
        engine, [docs], chunk_tokens=8, context=["prefix"], namespace="another", max_bytes=20 * one
    )
    assert few.chunks_captured == 20
    assert len(few.failures) == few.documents - few.changed
    assert all("(max_bytes)" in failure.reason for failure in few.failures)

    # The files' headers, which are larger than so small chunks, are counted once some are written.
    engine.kv_bytes_per_token = few.bytes // few.tokens
    there = few.bytes
    more = precompute(
        engine, [docs], chunk_tokens=8, context=["prefix"], max_bytes=there + 40 * few.bytes // 20
    )
    assert 38 <= more.chunks_captured <= 40 and more.failures
    nothing_new = precompute(
        engine, [docs / "a.txt"], chunk_tokens=8, context=["prefix"], max_bytes=0
    )
    assert (nothing_new.changed, nothing_new.failures) == (1, [])
    assert not precompute(
        engine, [docs], chunk_tokens=8, context=["prefix"], max_bytes=10**9
    ).failures


@pytest.mark.parametrize("wrong", [-1, 1.5, "20GB", True])
def test_a_limit_is_a_number(docs: Path, engine: MadeUpEngine, wrong: object) -> None:
    with pytest.raises(OptionError, match="max_bytes is"):
        precompute(engine, [docs], max_bytes=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 tb", 1500 * 10**9), ("800", 800), ("7k", 7000), ("0", 0)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "20 GiB", "1e9", "20 apples"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(OptionError, match="is no size"):
        size_in_bytes(text)
