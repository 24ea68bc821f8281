"""Vector search against brute force, with removal, graphs and threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from semkv_rag.prompt_cache.vectors import index as vectors
from semkv_rag.prompt_cache.vectors.index import VectorIndex, Vectors, normalised

DIM = 32


def made(count: int, seed: int = 0) -> Vectors:
    return normalised(np.random.default_rng(seed).standard_normal((count, DIM), np.float32))


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


class Reference:
    """All vectors in a dictionary."""

    def __init__(self) -> None:
        self.of: dict[str, Vectors] = {}

    def search(self, vector: Vectors, k: int) -> list[tuple[str, float]]:
        found = [(id_, float(own @ vector)) for id_, own in self.of.items()]
        return sorted(found, key=lambda one: -one[1])[:k]


def test_as_brute_force_through_adding_replacing_and_removing() -> None:
    chance = np.random.default_rng(1)
    index, reference = VectorIndex(DIM), Reference()
    assert index.search(made(1)[0], 3) == []
    for step in range(60):
        ids = [f"p{chance.integers(300)}" for _ in range(chance.integers(1, 40))]
        ids = list(dict.fromkeys(ids))
        if chance.random() < 0.6:
            new = made(len(ids), seed=step + 100)
            index.add(ids, new)
            reference.of |= dict(zip(ids, new, strict=True))
        else:
            index.remove(ids)
            for id_ in ids:
                reference.of.pop(id_, None)
        assert len(index) == len(reference.of)
        asked = made(1, seed=step)[0]
        found, wanted = index.search(asked, 5), reference.search(asked, 5)
        assert [id_ for id_, _ in found] == [id_ for id_, _ in wanted]
        assert [s for _, s in found] == pytest.approx([s for _, s in wanted], abs=1e-5)


def test_the_nearest_are_found_although_all_nearer_ones_were_removed() -> None:
    index = VectorIndex(DIM)
    base = made(1)[0]
    near = normalised(base + 0.01 * made(60, seed=1))
    index.add([f"near{number}" for number in range(60)], near)
    index.add(["far"], made(1, seed=2))
    index.remove([f"near{number}" for number in range(60)])
    assert [id_ for id_, _ in index.search(base, 1)] == ["far"]


def test_a_similarity_is_never_above_one() -> None:
    index = VectorIndex(DIM)
    many = made(200)
    index.add([str(number) for number in range(200)], many)
    assert all(index.search(vector, 1)[0][1] <= 1.0 for vector in many)


def test_a_graph_takes_over_and_finds_the_near_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "GRAPH_FROM", 500)
    index = VectorIndex(DIM)
    many = made(2000)
    ids = [str(number) for number in range(2000)]
    for first in range(0, 2000, 100):  # some while the graph is built
        index.add(ids[first : first + 100], many[first : first + 100])
    until(lambda: index.is_graph)
    index.remove(ids[:100])
    changed = normalised(many + 0.02 * made(2000, seed=5))
    nearest = [index.search(vector, 1)[0][0] for vector in changed]
    hits = sum(found == id_ for found, id_ in zip(nearest[100:], ids[100:], strict=True))
    assert hits >= 0.99 * 1900
    assert not set(nearest) & set(ids[:100]), "a removed one is never found"
    index.remove(ids[100:1800])  # few are left: all are compared again
    until(lambda: not index.is_graph)
    assert len(index) == 200
    assert [index.search(vector, 1)[0][0] for vector in many[1800:]] == ids[1800:]
    index.close()


def test_a_graph_with_many_removed_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "GRAPH_FROM", 100)
    index = VectorIndex(DIM)
    many = made(400)
    ids = [str(number) for number in range(400)]
    index.add(ids, many)
    until(lambda: index.is_graph)
    index.remove(ids[:150])
    until(lambda: index._rows.dead == 0)
    assert index.is_graph
    assert {id_ for vector in many for id_, _ in index.search(vector, 1)} <= set(ids[150:])
    index.close()


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "GRAPH_FROM", 300)
    index = VectorIndex(DIM)
    kept = made(50, seed=9)
    index.add([f"kept{number}" for number in range(50)], kept)

    def work(seed: int) -> None:
        for round_ in range(10):
            ids = [f"{seed}-{number}" for number in range(30)]
            index.add(ids, made(30, seed=100 * seed + round_))
            for number in range(0, 50, 7):
                assert index.search(kept[number], 1)[0][0] == f"kept{number}"
            if round_ % 2:
                index.remove(ids)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(20)))
    assert len(index) == 50
    index.close()


def test_what_cannot_be_compared() -> None:
    index = VectorIndex(DIM)
    with pytest.raises(ValueError, match="32 numbers"):
        index.search(np.ones(5, np.float32), 1)
    with pytest.raises(ValueError, match="2 ids"):
        index.add(["a", "b"], made(1))
    for bad in (np.zeros((1, 4)), np.full((1, 4), np.nan), np.ones(4)):
        with pytest.raises(ValueError, match=r"zero or not finite|must be"):
            normalised(bad.astype(np.float32))
