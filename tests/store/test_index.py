"""Promising chunks and asking for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3

from semkv_rag.errors import OptionError, StoreError
from semkv_rag.store import ChunkKey, ChunkRecord, KVStore
from tests.store import made


def test_a_promised_chunk_is_found_with_what_its_file_says(store: KVStore) -> None:
    header = made.header(1, context=3, tokens=16)
    key = made.write(store, header)
    assert store.get(made.MODEL, "default", [header.id]) == {}
    assert store.add([key]) == {header.id}
    assert store.get(made.MODEL, "default", [header.id, "f" * 64]) == {
        header.id: ChunkRecord(
            id=header.id,
            model=made.MODEL,
            namespace="default",
            kind="document",
            token_count=16,
            context_count=3,
            bytes=store.path(made.MODEL, "default", header.id).stat().st_size,
            created_at=1000.0,
            used_at=1000.0,
            context=blake3(np.asarray(header.context, "<i4").tobytes()).hexdigest(),
        )
    }
    assert list(store.chunks()) == list(store.get(made.MODEL, "default", [header.id]).values())


def test_tokens_are_those_of_the_file(store: KVStore) -> None:
    headers = [made.header(seed, context=seed % 3) for seed in range(7)]
    store.add([made.write(store, header) for header in headers])
    found = store.tokens(made.MODEL, "default", [header.id for header in headers])
    assert found.keys() == {header.id for header in headers}
    for header in headers:
        stored = found[header.id]
        assert stored.tokens.dtype == stored.context.dtype == np.int32
        np.testing.assert_array_equal(stored.tokens, header.tokens)
        np.testing.assert_array_equal(stored.context, header.context)


def test_chunks_behind_the_same_prefix_share_it(store: KVStore) -> None:
    ids = [made.put(store, seed) for seed in range(3)]
    found = store.tokens(made.MODEL, "default", ids)
    assert found[ids[0]].context is found[ids[2]].context
    store.remove(made.MODEL, "default", ids[:2])
    assert store.tokens(made.MODEL, "default", ids)[ids[2]].context.tolist() == [0, 1, 2]
    store.remove(made.MODEL, "default", ids)
    ids = [made.put(store, 5)]
    assert store.tokens(made.MODEL, "default", ids)[ids[0]].context.tolist() == [0, 1, 2]


def test_a_namespace_sees_only_its_own(store: KVStore) -> None:
    mine = made.put(store, 1, namespace="mine")
    theirs = made.put(store, 1, namespace="theirs")
    assert mine != theirs
    both = [mine, theirs]
    for namespace, own in (("mine", mine), ("theirs", theirs)):
        assert store.get(made.MODEL, namespace, both).keys() == {own}
        assert store.tokens(made.MODEL, namespace, both).keys() == {own}
        assert [record.id for record in store.chunks(namespace=namespace)] == [own]
    assert store.get("another model", "mine", both) == {}
    assert store.remove(made.MODEL, "mine", both) == 1
    assert store.get(made.MODEL, "theirs", both).keys() == {theirs}
    assert store.path(made.MODEL, "theirs", theirs).exists()


def test_what_is_not_on_disk_is_not_promised(store: KVStore) -> None:
    good = made.write(store, made.header(1))
    torn = made.write(store, made.header(2))
    path = store.path(torn.model, torn.namespace, torn.id)
    path.write_bytes(path.read_bytes()[:100])
    half = made.write(store, made.header(3, world_size=2))  # the other rank's file is missing
    elsewhere = made.write(store, made.header(4, namespace="another"))
    missing = ChunkKey("a" * 64, made.MODEL, "default")
    strange = ChunkKey("../../etc", made.MODEL, "default")
    misplaced = ChunkKey(elsewhere.id, made.MODEL, "default")
    asked = [missing, good, torn, half, misplaced, strange]
    assert store.add(asked) == {good.id}
    assert [record.id for record in store.chunks()] == [good.id]


def test_all_ranks_count(store: KVStore) -> None:
    headers = [made.header(1, rank=rank, world_size=2) for rank in range(2)]
    keys = [made.write(store, header) for header in headers]
    assert store.add(keys[:1]) == {keys[0].id}
    record = store.get(made.MODEL, "default", [keys[0].id])[keys[0].id]
    paths = [store.path(made.MODEL, "default", keys[0].id, rank) for rank in range(2)]
    assert record.bytes == sum(path.stat().st_size for path in paths)
    assert store.remove(made.MODEL, "default", [keys[0].id]) == 1
    assert not any(path.exists() for path in paths)


def test_adding_again_changes_nothing(store: KVStore) -> None:
    id_ = made.put(store, 1)
    before = store.get(made.MODEL, "default", [id_]), store.changes(made.MODEL, 0)
    made.put(store, 1)
    assert (store.get(made.MODEL, "default", [id_]), store.changes(made.MODEL, 0)) == before
    store.add([ChunkKey(id_, made.MODEL, "default")] * 3)
    assert (store.get(made.MODEL, "default", [id_]), store.changes(made.MODEL, 0)) == before


@pytest.mark.slow
def test_thousands_at_once(store: KVStore) -> None:
    """More ids than a statement takes parameters."""
    ids = [made.put(store, seed) for seed in range(3)]
    many = [f"{number:064x}" for number in range(70_000)]
    assert store.get(made.MODEL, "default", [*many, *ids]).keys() == set(ids)
    assert store.tokens(made.MODEL, "default", [*many, *ids]).keys() == set(ids)
    store.touch([*many, *ids])
    assert store.remove(made.MODEL, "default", [*many, *ids]) == 3


def test_models_say_what_they_stand_for(store: KVStore) -> None:
    made.put(store, 1)
    assert [(model.fingerprint, model.description) for model in store.models()] == [
        (made.MODEL, {})
    ]
    store.add_model(made.MODEL, {"name": "tiny", "dtype": "bfloat16"})
    store.add_model("other", {"name": "other"})
    assert {model.fingerprint: model.description for model in store.models()} == {
        made.MODEL: {"name": "tiny", "dtype": "bfloat16"},
        "other": {"name": "other"},
    }


def test_stats_are_per_model_and_namespace(store: KVStore) -> None:
    ids = [made.put(store, seed, namespace="a") for seed in range(3)]
    made.put(store, 1, namespace="b")
    store.put_source(made.MODEL, "a", "doc", "d", ids)
    first, second = store.stats()
    assert (first.namespace, first.chunks, first.sources, first.tokens) == ("a", 3, 1, 48)
    assert first.bytes == sum(record.bytes for record in store.chunks(namespace="a"))
    assert (second.namespace, second.chunks, second.sources) == ("b", 1, 0)
    assert store.stats("b") == [second]


def test_names_that_lead_out_of_the_store(store: KVStore) -> None:
    for model, id_ in (("..", "a" * 64), ("m", "../../x"), ("m/../..", "a"), ("", "a"), ("m", "")):
        with pytest.raises(StoreError):
            store.path(model, "default", id_)
    with pytest.raises(OptionError):
        store.path("m", "", "a" * 64)
    inside = store.path("m", "../../../x", "a" * 64)
    assert inside.resolve().is_relative_to(store.root.resolve())


def test_threads_share_a_store(store: KVStore) -> None:
    lost: list[str] = []

    def work(seed: int) -> bool:
        id_ = made.put(store, seed)
        try:
            store.touch([id_])
        except StoreError as error:  # others wrote for long: the note is lost, and nothing else
            lost.append(str(error))
        found = store.tokens(made.MODEL, "default", [id_])[id_]
        return bool(np.array_equal(found.tokens, made.header(seed).tokens))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(40)))
    assert len(list(store.chunks())) == 40
    assert all("lock" in reason for reason in lost)


def test_a_closed_store_says_so(store: KVStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.models()
    with pytest.raises(StoreError, match="closed"):
        store.touch(["a"])
