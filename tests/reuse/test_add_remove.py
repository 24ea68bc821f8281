"""The index follows the store: chunks come and go, at any time and in any number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from semkv_rag.reuse import ChunkIndex, StoredTokens, TokenArray, matcher, segment

from .shelf import Shelf

A = list(range(1000, 1040))
B = list(range(2000, 2040))


def random_chunks(count: int, tokens: int = 60) -> dict[str, TokenArray]:
    drawn = np.random.default_rng(7).integers(0, 50_000, (count, tokens), dtype=np.int32)
    return {f"chunk-{number}": row for number, row in enumerate(drawn)}


def index_of(chunks: dict[str, TokenArray]) -> ChunkIndex:
    empty = np.zeros(0, dtype=np.int32)
    return ChunkIndex(lambda ids: {name: StoredTokens(chunks[name], empty) for name in ids})


def found(index: ChunkIndex, tokens: TokenArray) -> list[str]:
    return [span.chunk_id for span in index.match(tokens)]


def test_added_chunk_is_found_at_once(shelf: Shelf) -> None:
    shelf.put("a", A)
    assert shelf.match(A + B) == [("a", 0, 0, 40, True)]
    shelf.put("b", B)
    assert shelf.match(A + B) == [("a", 0, 0, 40, True), ("b", 0, 40, 40, False)]


def test_removed_chunk_is_never_found_again(shelf: Shelf) -> None:
    shelf.put("a", A)
    shelf.put("b", B)
    shelf.match(A + B)
    shelf.index.remove(["a", "unknown"])
    assert shelf.match(A + B) == [("b", 0, 40, 40, False)]
    assert len(shelf.index) == 1
    shelf.index.remove(["a", "b"])
    assert shelf.match(A + B) == []
    assert len(shelf.index) == 0


def test_removed_chunk_can_come_back(shelf: Shelf) -> None:
    shelf.put("a", A)
    shelf.index.remove(["a"])
    shelf.put("a", A)
    assert shelf.match(A) == [("a", 0, 0, 40, True)]


def test_adding_a_chunk_twice_changes_nothing(shelf: Shelf) -> None:
    shelf.put("a", A)
    before = shelf.index.nbytes
    tokens = shelf.chunks["a"].tokens
    shelf.index.add([("a", tokens), ("a", tokens)])
    assert len(shelf.index) == 1
    assert shelf.index.nbytes == before


def test_twin_takes_over_when_the_older_one_is_removed(shelf: Shelf) -> None:
    shelf.put("old", A, B)
    shelf.put("new", A, B[::-1])
    assert shelf.match([7, *A]) == [("old", 0, 1, 40, False)]
    shelf.index.remove(["old"])
    assert shelf.match([7, *A]) == [("new", 0, 1, 40, False)]


def test_chunks_before_a_fault_of_the_source_are_kept(shelf: Shelf) -> None:
    def failing() -> Iterator[tuple[str, TokenArray]]:
        yield "a", np.array(A, dtype=np.int32)
        raise OSError("connection lost")

    shelf.chunks["a"] = StoredTokens(np.array(A, dtype=np.int32), np.zeros(0, dtype=np.int32))
    with pytest.raises(OSError, match="connection lost"):
        shelf.index.add(failing())
    assert shelf.match(A) == [("a", 0, 0, 40, True)]


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of at most 100 chunks of 60 tokens, so that a few thousand make many."""
    monkeypatch.setattr(matcher, "_SMALL_WINDOWS", 50)
    monkeypatch.setattr(matcher, "_BLOCK_WINDOWS", 300)
    monkeypatch.setattr(matcher, "MAX_WINDOWS", 1100)


@pytest.mark.usefixtures("small_segments")
def test_every_chunk_is_found_in_whatever_segment_it_is() -> None:
    chunks = random_chunks(3000)
    index = index_of(chunks)
    names = list(chunks)
    index.add((name, chunks[name]) for name in names[:1000])
    for name in names[1000:1100]:  # one by one
        index.add([(name, chunks[name])])
    index.add((name, chunks[name]) for name in names[1100:])
    for first in range(0, 3000, 50):
        prompt = np.concatenate([chunks[name] for name in names[first : first + 50]])
        assert found(index, prompt) == names[first : first + 50]


@pytest.mark.usefixtures("small_segments")
def test_removal_holds_through_merges_and_rewrites() -> None:
    chunks = random_chunks(2000)
    index = index_of(chunks)
    names = list(chunks)
    random = np.random.default_rng(3)
    live: set[str] = set()
    for first in range(0, 2000, 40):
        batch = names[first : first + 40]
        index.add((name, chunks[name]) for name in batch)
        live |= set(batch)
        gone = random.choice(sorted(live), 25, replace=False).tolist()
        index.remove(gone)
        live -= set(gone)
    assert len(index) == len(live) == 750
    for first in range(0, 2000, 50):
        batch = names[first : first + 50]
        prompt = np.concatenate([chunks[name] for name in batch])
        assert found(index, prompt) == [name for name in batch if name in live]


def test_memory_is_given_back() -> None:
    chunks = random_chunks(4000)
    index = index_of(chunks)
    index.add(chunks.items())
    full = index.nbytes
    index.remove(list(chunks)[:3500])
    assert index.nbytes < full / 2


def test_memory_per_chunk_of_512_tokens() -> None:
    chunks = random_chunks(2000, tokens=512)
    index = index_of(chunks)
    index.add((name.ljust(64), tokens) for name, tokens in chunks.items())
    assert index.nbytes / 2000 < 450


def test_hashes_that_share_all_indexed_bits_are_told_apart() -> None:
    """Windows in one slot of the directory, and entries at both ends of the segment."""
    hashes = np.array([0, 2**64 - 1, 1 << 30, 0, (1 << 30) + 5], dtype=np.uint64)
    one = np.array([0], dtype=np.uint32)
    built = segment.Segment.build(hashes, one, np.array([28], dtype=np.uint32), np.array([5]))
    wanted = np.array([0, 1 << 30, 1 << 40, 2**64 - 1], dtype=np.uint64)
    found_windows = built.oldest(wanted, 16)
    pairs = list(zip(found_windows.keys.tolist(), found_windows.ordinals.tolist(), strict=True))
    assert pairs == [(0, 0), (0, 3), (1, 2), (1, 4), (3, 1)]
    assert not found_windows.more.any()
