"""Chunks in a file are found as those in memory are, whatever came and went since, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_rag.reuse import ChunkIndex, StoredTokens, token_array
from semkv_rag.reuse.base import SECTIONS, Base

from .reference import check_sound
from .sections import packed, rebased
from .shelf import Shelf
from .test_against_reference import WINDOWS, stores_and_prompts

A = list(range(1000, 1040))
B = list(range(2000, 2040))
EMPTY = np.zeros(0, dtype=np.int32)


def id_of(name: object) -> str:
    """An id as the store has them; spread, and the same for the same name."""
    return np.random.default_rng(list(str(name).encode())).bytes(32).hex()


def renamed(store: dict[str, StoredTokens]) -> dict[str, StoredTokens]:
    return {id_of(name): chunk for name, chunk in store.items()}


def put_all(shelf: Shelf, store: dict[str, StoredTokens]) -> Shelf:
    for name, chunk in store.items():
        shelf.put(name, chunk.tokens.tolist(), chunk.context.tolist())
    return shelf


def long_enough(store: dict[str, StoredTokens], window: int) -> bool:
    return any(len(chunk.tokens) >= window for chunk in store.values())


@pytest.mark.slow
@settings(max_examples=150)
@given(drawn=stores_and_prompts(), window=WINDOWS, data=st.data())
def test_what_is_found_does_not_depend_on_where_chunks_lie(
    drawn: tuple[dict[str, StoredTokens], list[int]], window: int, data: st.DataObject
) -> None:
    store, prompt = renamed(drawn[0]), drawn[1]
    names = sorted(store)
    in_file = data.draw(st.sets(st.sampled_from(names)))
    first = {name: store[name] for name in names if name in in_file}
    later = {name: store[name] for name in names if name not in in_file}
    memory = put_all(put_all(Shelf(window), first), later)
    if not long_enough(first, window):
        return
    file = put_all(rebased(put_all(Shelf(window), first), window), later)
    assert file.match(prompt) == memory.match(prompt)
    assert sorted(memory.index.ids()) == names
    gone = data.draw(st.sets(st.sampled_from(names)))
    for shelf in (file, memory):
        shelf.index.remove(gone)
    assert file.match(prompt) == memory.match(prompt)
    back = {name: store[name] for name in sorted(gone)}
    for shelf in (file, memory):
        put_all(shelf, back)
    assert file.match(prompt) == memory.match(prompt)


def test_files_of_files_keep_what_is_there_by_age() -> None:
    shelf, expected = Shelf(), Shelf()
    for number in range(60):
        texts = {id_of((number, 0)): A if number % 7 == 0 else list(range(number, number + 30))}
        texts[id_of((number, 1))] = [*range(9000 + 50 * number, 9050 + 50 * number)]
        for name, text in texts.items():
            for one in (shelf, expected):
                one.put(name, text)
        if number % 3 == 0:
            gone = [id_of((number // 2, 0))]
            for one in (shelf, expected):
                one.index.remove(gone)
        if number % 10 == 9:
            shelf = rebased(shelf)
    assert set(shelf.index.ids()) == set(expected.index.ids())
    for prompt in (A, list(range(60)), list(range(9000, 12000))):
        assert shelf.match(prompt) == expected.match(prompt) != []


def test_removed_chunks_are_not_in_the_next_file() -> None:
    shelf = Shelf()
    shelf.put(id_of("a"), A)
    shelf.put(id_of("b"), B)
    shelf = rebased(shelf)
    shelf.index.remove([id_of("a"), id_of("unknown"), "no id"])
    assert shelf.index.beside_base == 1
    assert shelf.index.ids() == [id_of("b")]
    shelf = rebased(shelf)
    assert shelf.index.beside_base == 0
    assert len(shelf.index) == 1
    assert shelf.match(A) == []
    assert shelf.match(B) == [(id_of("b"), 0, 0, 40, True)]


def test_a_chunk_of_the_file_is_passed_over_when_it_is_added_again() -> None:
    shelf = Shelf()
    shelf.put(id_of("a"), A)
    shelf = rebased(shelf)
    shelf.put(id_of("a"), A)
    assert len(shelf.index) == 1
    shelf.index.add((id_of(name), token_array([*A, name])) for name in range(100))
    assert len(shelf.index) == 101


def test_nothing_is_packed_that_a_file_cannot_hold() -> None:
    shelf = Shelf()
    assert shelf.index.pack()() is None
    shelf.put(id_of("short"), A[:5])
    assert shelf.index.pack()() is None
    shelf.put("none of the store's ids", A)
    assert shelf.index.pack()() is None


def test_packing_goes_by_what_was_there_when_it_began() -> None:
    shelf = Shelf()
    shelf.put(id_of("a"), A)
    make = shelf.index.pack()
    shelf.put(id_of("b"), B)
    shelf.index.remove([id_of("a")])
    arrays = make()
    assert arrays is None or len(arrays["lengths"]) == 1


def random_shelf(chunks: int, tokens: int) -> Shelf:
    drawn = np.random.default_rng(7).integers(0, 50_000, (chunks, tokens), dtype=np.int32)
    shelf = Shelf()
    shelf.chunks = {id_of(number): StoredTokens(row, EMPTY) for number, row in enumerate(drawn)}
    shelf.index.add((name, chunk.tokens) for name, chunk in shelf.chunks.items())
    return shelf


@pytest.mark.parametrize("tokens", [64, 112, 300, 512])
def test_memory_per_chunk_in_a_file(tokens: int) -> None:
    shelf = random_shelf(3000, tokens)
    file = rebased(shelf)
    assert file.index.nbytes / 3000 <= 64
    prompt = np.concatenate([shelf.chunks[id_of(number)].tokens for number in range(16)])
    assert [span.chunk_id for span in file.index.match(prompt)] == [id_of(n) for n in range(16)]


def test_little_is_read_from_the_file_for_what_is_not_stored() -> None:
    shelf = random_shelf(3000, 512)
    sections = packed(shelf.index)
    index = ChunkIndex(shelf.tokens_of, base=Base(sections, 8))
    sections.reads = 0
    other = np.random.default_rng(8).integers(0, 50_000, 8192, dtype=np.int32)
    assert index.match(other) == []
    assert sections.reads < 200
    assert shelf.asked == []


@pytest.mark.parametrize("name", SECTIONS)
def test_sections_that_do_not_belong_together_are_refused(name: str) -> None:
    for change in (lambda b: b[:-8], lambda b: b + bytes(8), lambda b: bytearray()):
        sections = packed(random_shelf(20, 60).index)
        sections.bytes[name] = bytearray(change(sections.bytes[name]))
        with pytest.raises(ValueError, match=r"it\b|is not as long|directory"):
            Base(sections, 8)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(SECTIONS), st.integers(0, 1 << 30), st.binary(min_size=1, max_size=16)
        ),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_a_forged_file_says_only_equal_tokens_are_found(
    changes: Sequence[tuple[str, int, bytes]],
) -> None:
    shelf = random_shelf(40, 60)
    shelf.index.add([(id_of(("twin", n)), token_array(A)) for n in range(30)])
    shelf.chunks |= {id_of(("twin", n)): StoredTokens(token_array(A), EMPTY) for n in range(30)}
    sections = packed(shelf.index)
    for name, place, content in changes:
        size = len(sections.bytes[name])
        begin = place % size
        sections.bytes[name][begin : begin + len(content)] = content[: size - begin]
    try:
        index = ChunkIndex(shelf.tokens_of, base=Base(sections, 8))
    except ValueError:
        return
    prompt = [
        *shelf.chunks[id_of(3)].tokens.tolist(),
        *A,
        5,
        *shelf.chunks[id_of(7)].tokens.tolist(),
    ]
    check_sound(prompt, shelf.chunks, index.match(token_array(prompt)), 12)
    index.remove([id_of(3), id_of(4)])
    check_sound(prompt, shelf.chunks, index.match(token_array(prompt)), 12)
    index.ids()
    index.pack()
