"""What is known of prompts: written, followed by others, and gone with the chunk."""

from __future__ import annotations

import multiprocessing
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import create_engine, func, select

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore, PromptRecord, VectorKey, prompts
from semkv_rag.store.index import schema
from tests.store import made

SEMANTIC = VectorKey("semantic", "minilm")
VISION = VectorKey("vision", "phash")


def record(id_: str, key: str = "k", namespace: str = "default", **fields: str) -> PromptRecord:
    texts = {"text": "Why?", "images": "", "source_version": "", **fields}
    return PromptRecord(id_, made.MODEL, namespace, key, created_at=1.0, **texts)


def vector(seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(8, dtype=np.float32)


def put(store: KVStore, seed: int, key: str = "k", namespace: str = "default") -> str:
    id_ = made.put(store, seed, namespace=namespace)
    assert store.prompts.put(record(id_, key, namespace), {SEMANTIC: vector(seed)})
    return id_


def rows(store: KVStore) -> dict[str, int]:
    """How many rows each of the prompts' tables has."""
    engine = create_engine(store.index_url)
    with engine.connect() as connection:
        counted = {
            name: connection.scalar(select(func.count()).select_from(schema.metadata.tables[name]))
            or 0
            for name in ("prompts", "embeddings", "outcomes")
        }
    engine.dispose()
    return counted


def test_a_prompt_is_found_by_its_key_and_its_id(store: KVStore) -> None:
    first, second = put(store, 1), put(store, 2)
    put(store, 3, key="another")
    found = store.prompts.with_key(made.MODEL, "default", "k")
    assert {prompt.id for prompt in found} == {first, second}
    assert store.prompts.get(made.MODEL, "default", [first, "f" * 64]) == {first: record(first)}
    assert store.prompts.with_key("another model", "default", "k") == []


def test_a_prompt_without_its_chunk_is_not_written(store: KVStore) -> None:
    assert not store.prompts.put(record("f" * 64), {SEMANTIC: vector(1)})
    id_ = made.put(store, 1)
    assert not store.prompts.put(record(id_, namespace="another"))
    assert rows(store) == {"prompts": 0, "embeddings": 0, "outcomes": 0}


def test_putting_again_takes_its_place_and_keeps_its_outcomes(store: KVStore) -> None:
    id_ = put(store, 1)
    key = (made.MODEL, "default", id_, SEMANTIC)
    assert store.prompts.add_outcome(*key, similarity=0.9, correct=True)
    newer = record(id_, "new key", text="Why not?", source_version="2")
    assert store.prompts.put(newer, {SEMANTIC: vector(9), VISION: vector(8)})
    assert store.prompts.get(made.MODEL, "default", [id_]) == {id_: newer}
    found = store.prompts.vectors(made.MODEL, "default", SEMANTIC, [id_])
    np.testing.assert_array_equal(found[id_], vector(9))
    assert [o.correct for o in store.prompts.outcomes(*key)] == [True]
    assert rows(store) == {"prompts": 1, "embeddings": 2, "outcomes": 1}


def remove(store: KVStore, id_: str) -> None:
    store.remove(made.MODEL, "default", [id_])


def evict(store: KVStore, id_: str) -> None:
    assert store.evict(0) == [id_]


def lose(store: KVStore, id_: str) -> None:
    store.path(made.MODEL, "default", id_).unlink()
    store.verify(repair=True)


@pytest.mark.parametrize("go", [remove, evict, lose])
def test_everything_goes_with_the_chunk(store: KVStore, go: Callable[[KVStore, str], None]) -> None:
    id_ = put(store, 1)
    store.prompts.add_outcome(made.MODEL, "default", id_, SEMANTIC, similarity=0.9, correct=False)
    go(store, id_)
    assert rows(store) == {"prompts": 0, "embeddings": 0, "outcomes": 0}
    assert not store.prompts.add_outcome(
        made.MODEL, "default", id_, SEMANTIC, similarity=0.9, correct=False
    )


def test_prompts_can_be_evicted_alone(store: KVStore) -> None:
    document = made.put(store, 1)
    header = replace(made.header(2), kind="prompt")
    store.add([made.write(store, header)])
    assert store.evict(0, "default", "prompt") == [header.id]
    assert [chunk.id for chunk in store.chunks()] == [document]


def test_a_follower_knows_what_there_is(store: KVStore) -> None:
    first = put(store, 1)
    told = store.prompts.vector_changes(made.MODEL, [SEMANTIC], 0)
    assert told.reset
    assert told.added == [("default", SEMANTIC, first)]
    nothing = store.prompts.vector_changes(made.MODEL, [SEMANTIC], told.last)
    assert (nothing.removed, nothing.added, nothing.reset) == ([], [], False)
    assert nothing.last == told.last

    made.put(store, 5)  # a chunk that is no prompt
    second = put(store, 2, namespace="another")
    remove(store, first)
    news = store.prompts.vector_changes(made.MODEL, [SEMANTIC], told.last)
    assert news.removed == [("default", first)]
    assert news.added == [("another", SEMANTIC, second)]
    back = put(store, 1)
    assert back == first
    again = store.prompts.vector_changes(made.MODEL, [SEMANTIC], told.last)
    assert again.removed == [("default", first)], "to be taken in before what came"
    assert [entry[2] for entry in again.added] == [second, first]
    assert store.prompts.vector_changes(made.MODEL, [VISION], told.last).added == []
    assert store.prompts.vector_changes("another", [SEMANTIC], told.last).added == []


def test_chunks_are_followed_past_the_prompts_numbers(store: KVStore) -> None:
    point = store.changes(made.MODEL, 0).last
    put(store, 1)
    told = store.changes(made.MODEL, point)
    assert len(told.entries) == 1
    assert store.changes(made.MODEL, told.last).entries == []
    id_ = put(store, 2)
    assert [entry.chunk_id for entry in store.changes(made.MODEL, told.last).entries] == [id_]


def test_a_namespace_sees_only_its_own(store: KVStore) -> None:
    id_ = put(store, 1, namespace="mine")
    store.prompts.add_outcome(made.MODEL, "mine", id_, SEMANTIC, similarity=0.9, correct=True)
    theirs = (made.MODEL, "theirs")
    assert store.prompts.get(*theirs, [id_]) == {}
    assert store.prompts.with_key(*theirs, "k") == []
    assert store.prompts.vectors(*theirs, SEMANTIC, [id_]) == {}
    assert store.prompts.outcomes(*theirs, id_, SEMANTIC) == []
    assert not store.prompts.add_outcome(*theirs, id_, SEMANTIC, similarity=1.0, correct=True)


def test_outcomes_are_of_one_layer_and_encoder(store: KVStore) -> None:
    id_ = put(store, 1)
    entry = (made.MODEL, "default", id_)
    for similarity in (0.9, 0.8):
        store.prompts.add_outcome(*entry, SEMANTIC, similarity=similarity, correct=True)
    store.prompts.add_outcome(
        *entry, VectorKey("semantic", "another"), similarity=0.7, correct=False
    )
    found = store.prompts.outcomes(*entry, SEMANTIC)
    assert [(o.similarity, o.correct) for o in found] == [(0.9, True), (0.8, True)]


def test_sightings_are_counted_and_forgotten(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sight = store.prompts.count_sighting
    assert [sight(made.MODEL, "default", "k") for _ in range(3)] == [1, 2, 3]
    assert sight(made.MODEL, "another", "k") == 1
    monkeypatch.setattr(prompts, "SIGHTING_SECONDS", -1.0)
    assert sight(made.MODEL, "default", "k") == 1


def write_prompts(root: Path, index_url: str | None, seed: int, lost: SimpleQueue[str]) -> None:
    with KVStore(root, index_url=index_url) as store:
        for number in range(seed, seed + 20):
            put(store, number)
            try:
                store.prompts.count_sighting(made.MODEL, "default", "shared")
            except StoreError as error:  # others wrote for long: this one is not counted
                lost.put(str(error))


@pytest.mark.slow
def test_several_processes(store: KVStore, index_url: str | None) -> None:
    fork = multiprocessing.get_context("fork")
    lost: SimpleQueue[str] = fork.SimpleQueue()
    writers = [
        fork.Process(target=write_prompts, args=(store.root, index_url, 100 * number, lost))
        for number in range(3)
    ]
    for writer in writers:
        writer.start()
    seen: set[str] = set()
    point = 0
    while True:
        running = any(writer.is_alive() for writer in writers)
        told = store.prompts.vector_changes(made.MODEL, [SEMANTIC], point)
        point = told.last
        seen.update(id_ for _, _, id_ in told.added)
        if not running:
            break
    assert [writer.exitcode for writer in writers] == [0] * 3
    assert len(seen) == 60, "none was missed, although numbers are given before they are committed"
    reasons = []
    while not lost.empty():
        reasons.append(lost.get())
    assert all("lock" in reason for reason in reasons)
    assert store.prompts.count_sighting(made.MODEL, "default", "shared") == 61 - len(reasons)


def test_an_index_of_the_first_revision_is_brought_up_to_date(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        id_ = made.put(store, 1)
    with sqlite3.connect(tmp_path / "index.sqlite") as connection:
        for table in (
            *("states", "sightings", "outcomes", "embeddings", "prompts"),
            *("limits", "pins", "removals"),
        ):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("DROP INDEX changes_of_namespace")
        connection.execute("ALTER TABLE chunks DROP COLUMN codec")
        connection.execute("UPDATE alembic_version SET version_num = '0001'")
    connection.close()
    with pytest.raises(StoreError, match="open it for writing once"):
        KVStore(tmp_path, read_only=True)
    with KVStore(tmp_path) as store:
        assert store.prompts.put(record(id_), {SEMANTIC: vector(1)})
