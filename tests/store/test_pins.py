"""What is pinned goes only when somebody removes it by name."""

from __future__ import annotations

import pytest
import torch

from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore, Limit, Pin, Taken
from tests.store import made

OTHER = "fedcba9876543210" * 4


def put(store: KVStore, seed: int, *, model: str = made.MODEL, namespace: str = "default") -> str:
    key = made.write(store, made.header(seed, model=model, namespace=namespace))
    assert store.add([key]) == {key.id}
    return key.id


def ids(store: KVStore) -> set[str]:
    return {record.id for record in store.chunks()}


def test_a_pin_holds_for_what_a_document_becomes(store: KVStore) -> None:
    old, new, shared, loose = (put(store, seed) for seed in range(4))
    store.put_source(made.MODEL, "default", "doc", "1", [old, shared])
    store.put_source(made.MODEL, "default", "other", "1", [shared, loose])
    pin = Pin(namespace="default", source="doc")
    store.lifecycle.pin(pin)
    store.lifecycle.pin(pin)
    assert store.lifecycle.pins() == [pin]
    assert store.lifecycle.pinned([old, new, shared, loose]) == {old, shared}
    assert [(one.name, one.pinned) for one in store.sources()] == [("doc", True), ("other", False)]
    store.put_source(made.MODEL, "default", "doc", "2", [new, shared])
    assert store.lifecycle.pinned([old, new, shared, loose]) == {new, shared}
    assert set(store.evict(0)) == {loose}
    assert ids(store) == {new, shared}
    assert store.lifecycle.unpin(pin)
    assert not store.lifecycle.unpin(pin)
    assert set(store.evict(0)) == {new, shared}


def test_models_and_namespaces(store: KVStore) -> None:
    kept = {
        put(store, 1, model=OTHER, namespace="a"),
        put(store, 1, namespace="b"),
        put(store, 2, model=OTHER, namespace="b"),
    }
    put(store, 3, namespace="a")
    store.states.put(made.MODEL, "a", "a" * 64, torch.ones(2, 2))
    store.states.put(made.MODEL, "b", "a" * 64, torch.ones(2, 2))
    store.lifecycle.pin(Pin(model=OTHER, namespace="a"))
    store.lifecycle.pin(Pin(namespace="b"))
    store.evict(0)
    assert ids(store) == kept
    assert [state.namespace for state in store.states.records()] == ["b"]
    later = put(store, 4, namespace="b")
    store.evict(0)
    assert ids(store) == {*kept, later}, "it holds for what comes later"
    store.lifecycle.unpin(Pin(namespace="b"))
    store.lifecycle.pin(Pin(model=OTHER))
    assert store.lifecycle.named([Pin(model=OTHER), Pin(namespace="a")]).chunks == 2
    store.evict(0)
    assert {record.model for record in store.chunks()} == {OTHER}
    assert list(store.states.records()) == []


@pytest.mark.parametrize(
    "wrong", [Pin(), Pin(source="doc"), Pin(model="m", source="doc"), Pin(namespace="")]
)
def test_what_pins_nothing_in_particular_is_refused(store: KVStore, wrong: Pin) -> None:
    with pytest.raises(OptionError):
        store.lifecycle.pin(wrong)


def test_a_document_of_another_namespace_is_another(store: KVStore) -> None:
    mine, theirs = put(store, 1, namespace="mine"), put(store, 1, namespace="theirs")
    store.put_source(made.MODEL, "mine", "doc", "1", [mine])
    store.put_source(made.MODEL, "theirs", "doc", "1", [theirs])
    store.lifecycle.pin(Pin(namespace="mine", source="doc"))
    store.evict(0)
    assert ids(store) == {mine}


# ---- removing ----------------------------------------------------------------------------------


def test_removing_a_document_takes_its_pin_too(store: KVStore) -> None:
    own, shared = put(store, 1), put(store, 2)
    store.put_source(made.MODEL, "default", "doc", "1", [own, shared])
    store.put_source(made.MODEL, "default", "other", "1", [shared])
    for name in ("doc", "other"):
        store.lifecycle.pin(Pin(namespace="default", source=name))
    bytes_ = store.get(made.MODEL, "default", [own])[own].bytes
    would = store.lifecycle.remove(None, "default", ["doc", "nothing"], dry_run=True)
    assert would == Taken(sources=1, chunks=1, states=0, bytes=bytes_, pinned=1)
    assert ids(store) == {own, shared}
    assert store.lifecycle.remove(None, "default", ["doc", "nothing"]) == would
    assert ids(store) == {shared}
    assert store.lifecycle.pins() == [Pin(namespace="default", source="other")]


def test_a_pin_stays_while_another_model_has_the_document(store: KVStore) -> None:
    for model in (made.MODEL, OTHER):
        store.put_source(model, "default", "doc", "1", [put(store, 1, model=model)])
    pin = Pin(namespace="default", source="doc")
    store.lifecycle.pin(pin)
    store.lifecycle.remove(made.MODEL)
    assert store.lifecycle.pins() == [pin]
    assert [one.model for one in store.sources()] == [OTHER]
    store.lifecycle.remove(OTHER, "default", ["doc"])
    assert store.lifecycle.pins() == []


def test_all_of_a_model_or_a_namespace_goes(store: KVStore) -> None:
    for model in (made.MODEL, OTHER):
        for namespace in ("a", "b"):
            for seed in range(40):
                put(store, seed, model=model, namespace=namespace)
            store.states.put(model, namespace, "a" * 64, torch.ones(2, 2))
            own = [c.id for c in store.chunks(model, namespace)]
            store.put_source(model, namespace, "doc", "1", own)
            store.prompts.count_sighting(model, namespace, "key")
    store.lifecycle.pin(Pin(namespace="a"))
    store.lifecycle.pin(Pin(namespace="b", source="doc"))
    store.lifecycle.set_limit(Limit("a", max_bytes=10**9))
    since = store.changes(OTHER, 0).last

    would = store.lifecycle.remove(namespace="a", dry_run=True)
    assert (would.sources, would.chunks, would.states, would.pinned) == (2, 80, 2, 80)
    assert store.lifecycle.remove(namespace="a") == would
    assert {record.namespace for record in store.chunks()} == {"b"}
    assert {source.namespace for source in store.sources()} == {"b"}
    assert store.lifecycle.pins() == [Pin(namespace="b", source="doc")]
    assert store.lifecycle.limits() == [Limit("a", max_bytes=10**9)]
    assert store.prompts.count_sighting(OTHER, "a", "key") == 1, "it was forgotten"
    assert store.prompts.count_sighting(OTHER, "b", "key") == 2
    told = store.changes(OTHER, since)
    assert {change.namespace for change in told.entries} == {"a"}
    assert len(told.entries) == 40

    would = store.lifecycle.collect([OTHER], dry_run=True)
    assert (would.models.sources, would.models.chunks, would.models.pinned) == (1, 40, 40)
    assert store.lifecycle.collect([OTHER]) == would
    assert [model.fingerprint for model in store.models()] == [made.MODEL]
    assert {record.model for record in store.chunks()} == {made.MODEL}
    assert store.verify().ok
    would = store.lifecycle.remove(dry_run=True)
    assert store.lifecycle.remove() == would
    assert would.chunks == 40
    assert ids(store) == set()
    assert list(store.root.rglob("*.safetensors")) == []
