"""Where chunks are found: at any offset, whole or in part."""

from __future__ import annotations

import numpy as np
import pytest

from semkv_rag.reuse import ChunkIndex, token_array

from .shelf import Shelf

A = list(range(1000, 1040))
B = list(range(2000, 2040))
TEXT = list(range(5))


@pytest.mark.parametrize("offset", range(14))
def test_whole_chunk_at_any_offset(shelf: Shelf, offset: int) -> None:
    shelf.put("a", A)
    before = list(range(offset))
    assert shelf.match(before + A + TEXT) == [("a", 0, offset, 40, offset == 0)]


def test_several_chunks_in_any_order_with_text_between(shelf: Shelf) -> None:
    shelf.put("a", A)
    shelf.put("b", B)
    assert shelf.match(TEXT + B + TEXT + A + TEXT) == [
        ("b", 0, 5, 40, False),
        ("a", 0, 50, 40, False),
    ]


def test_repeated_chunk_is_found_at_each_place(shelf: Shelf) -> None:
    shelf.put("a", A)
    assert shelf.match(A + A + TEXT + A) == [
        ("a", 0, 0, 40, True),
        ("a", 0, 40, 40, False),
        ("a", 0, 85, 40, False),
    ]


@pytest.mark.parametrize("cut", range(29))
def test_chunk_cut_short_at_either_end(shelf: Shelf, cut: int) -> None:
    shelf.put("a", A)
    assert shelf.match(TEXT + A[cut:] + TEXT) == [("a", cut, 5, 40 - cut, False)]
    assert shelf.match(TEXT + A[: 40 - cut] + TEXT) == [("a", 0, 5, 40 - cut, False)]


def test_other_tokens_at_the_edges(shelf: Shelf) -> None:
    shelf.put("a", A)
    assert shelf.match([7, *A[1:-1], 8]) == [("a", 1, 1, 38, False)]


def test_edited_chunk_is_found_in_parts(shelf: Shelf) -> None:
    shelf.put("a", A)
    replaced = [*A[:20], 7, *A[21:]]
    assert shelf.match(TEXT + replaced) == [("a", 0, 5, 20, False), ("a", 21, 26, 19, False)]
    inserted = [*A[:20], 7, 8, *A[20:]]
    assert shelf.match(TEXT + inserted) == [("a", 0, 5, 20, False), ("a", 20, 27, 20, False)]
    dropped = A[:15] + A[25:]
    assert shelf.match(TEXT + dropped) == [("a", 0, 5, 15, False), ("a", 25, 20, 15, False)]


def test_neighbours_of_one_document_share_their_overlap(shelf: Shelf) -> None:
    document = list(range(3000, 3100))
    shelf.put("first", document[:60])
    shelf.put("second", document[40:])
    assert shelf.match(TEXT + document) == [
        ("first", 0, 5, 60, False),
        ("second", 20, 65, 40, False),
    ]


def test_chunk_inside_a_longer_one_is_not_needed(shelf: Shelf) -> None:
    shelf.put("inner", A[10:30])
    shelf.put("outer", A)
    assert shelf.match(TEXT + A) == [("outer", 0, 5, 40, False)]
    (span,) = shelf.index.match(token_array(TEXT + A[10:30]))
    assert (span.dst, span.length) == (5, 20)


@pytest.mark.parametrize("window", [2, 4, 8, 12])
def test_shortest_run_is_found_wherever_it_starts_and_nothing_shorter(window: int) -> None:
    shelf = Shelf(window)
    shelf.put("a", A)
    shortest = shelf.index.shortest_run
    assert shortest <= window + window // 2
    for start in range(len(A) - shortest):
        run = A[start : start + shortest]
        assert shelf.match(TEXT + run + TEXT) == [("a", start, 5, shortest, False)]
        assert shelf.match(TEXT + run[:-1] + TEXT) == []


def test_runs_of_12_tokens_are_found_by_default(shelf: Shelf) -> None:
    assert shelf.index.shortest_run == 12


def test_empty_index_and_short_prompts_match_nothing(shelf: Shelf) -> None:
    assert shelf.match(A) == []
    shelf.put("a", A)
    shelf.put("tiny", [1, 2])
    shelf.put("nothing", [])
    assert shelf.match([]) == []
    assert shelf.match(A[:3]) == []
    assert shelf.match([1, 2]) == []
    assert len(shelf.index) == 3


def test_any_token_ids_are_compared_as_they_are(shelf: Shelf) -> None:
    low, high = -(2**31), 2**31 - 1
    odd = [low, high, -1, 0] * 4 + [5]
    shelf.put("odd", odd)
    assert shelf.match(odd) == [("odd", 0, 0, 17, True)]  # below 0 are images: never inexact
    # Cut to 32 bits these would be the stored ids.
    huge = np.array(odd, dtype=np.int64) + 2**32
    assert shelf.index.match(huge) == []
    assert shelf.index.match(np.array(odd, dtype=np.int64).astype(np.uint64)) != []


def test_a_hash_hit_alone_never_counts() -> None:
    shelf = Shelf()
    shelf.put("a", A)
    shelf.chunks["a"].tokens[:] = 9  # the store holds something else than was indexed
    assert shelf.match(A) == []


def test_chunk_the_store_no_longer_has_is_a_miss(shelf: Shelf) -> None:
    shelf.put("a", A)
    shelf.put("b", B)
    del shelf.chunks["a"]
    assert shelf.match(A + B) == [("b", 0, 40, 40, False)]


def test_faults_of_the_store_reach_the_caller() -> None:
    def broken(ids: object) -> dict[str, object]:
        raise OSError("gone")

    index = ChunkIndex(broken)  # type: ignore[arg-type]
    index.add([("a", np.array(A, dtype=np.int32))])
    with pytest.raises(OSError, match="gone"):
        index.match(np.array(A, dtype=np.int32))


def test_tokens_are_fetched_once_and_only_of_chunks_that_are_hit(shelf: Shelf) -> None:
    shelf.put("a", A)
    shelf.put("b", B)
    shelf.match(TEXT + A)
    shelf.match(A + TEXT)
    assert shelf.asked == ["a"]
