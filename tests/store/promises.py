"""What a store owes to its callers, and calls on it that keep account of that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from semkv_rag.store import ChunkFile, ChunkKey, KVStore
from tests.store import made

NAMESPACE = "default"


@dataclass(frozen=True)
class Ledger:
    """What returned calls promised and no later call began to take back.

    Attributes:
        seeds: of the chunks.
        states: the keys of the states, and the seed of each one's values.
        sources: each document's digest and its chunks' seeds.
    """

    seeds: frozenset[int] = frozenset()
    states: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)

    def check(self, store: KVStore) -> None:
        """All of it is there and whole, and the store promises nothing that is not."""
        report = store.verify()
        assert report.problems == ()
        keys = [key_of(seed) for seed in sorted(self.seeds)]
        stored = store.get(made.MODEL, NAMESPACE, [key.id for key in keys])
        assert {key.id for key in keys} == stored.keys()
        for key in keys:
            path = store.path(key.model, key.namespace, key.id)
            with ChunkFile(path, model=key.model, chunk_id=key.id) as file:
                file.verify()
        for key, seed in self.states.items():
            assert store.states.has(made.MODEL, NAMESPACE, key)
            loaded = store.states.load(made.MODEL, NAMESPACE, key)
            assert loaded is not None
            assert torch.equal(loaded, state_of(seed))
        for name, (digest, seeds) in self.sources.items():
            source = store.source(made.MODEL, NAMESPACE, name)
            assert source is not None
            assert source.digest == digest
            assert source.chunk_ids == tuple(key_of(seed).id for seed in seeds)


def key_of(seed: int) -> ChunkKey:
    return ChunkKey(made.header(seed).id, made.MODEL, NAMESPACE)


def state_of(seed: int) -> torch.Tensor:
    return torch.rand(4, 8, generator=torch.Generator().manual_seed(seed))


class Account:
    """Calls on stores, one after the other, and what they owe by now.

    Args:
        told: called with the ledger after each change of it.
    """

    def __init__(self, told: Callable[[Ledger], None] = lambda ledger: None) -> None:
        self.ledger = Ledger()
        self._listed: dict[str, set[int]] = {}
        self._told = told

    def add(self, store: KVStore, seed: int) -> None:
        """Write a chunk and promise it, also where it was there."""
        key = made.write(store, made.header(seed))
        assert store.add([key]) == {key.id}
        self._change(seeds=self.ledger.seeds | {seed})

    def put_source(self, store: KVStore, name: str, seeds: tuple[int, ...], digest: str) -> None:
        """Put a document; the chunks that it had before, and no other has, go."""
        listed = self._listed.setdefault(name, set())
        others = {
            seed
            for other, (_, listed_by_it) in self.ledger.sources.items()
            if other != name
            for seed in listed_by_it
        }
        sources = {k: v for k, v in self.ledger.sources.items() if k != name}
        self._change(seeds=self.ledger.seeds - (listed - set(seeds) - others), sources=sources)
        listed.update(seeds)  # until the call returns, the document may be either
        ids = [key_of(seed).id for seed in seeds]
        store.put_source(made.MODEL, NAMESPACE, name, digest, ids)
        self._listed[name] = set(seeds)
        self._change(sources=self.ledger.sources | {name: (digest, seeds)})

    def remove(self, store: KVStore, *seeds: int) -> None:
        self._change(seeds=self.ledger.seeds - set(seeds))
        store.remove(made.MODEL, NAMESPACE, [key_of(seed).id for seed in seeds])

    def put_state(self, store: KVStore, key: str, seed: int) -> None:
        """Store a state, in place of the one of that key."""
        self._change(states={k: v for k, v in self.ledger.states.items() if k != key})
        store.states.put(made.MODEL, NAMESPACE, key, state_of(seed))
        self._change(states=self.ledger.states | {key: seed})

    def evict(self, store: KVStore) -> None:
        """Everything goes, except for what is known of documents."""
        self._change(seeds=frozenset(), states={})
        store.evict(0)

    def touch(self, store: KVStore) -> None:
        store.touch([key_of(seed).id for seed in self.ledger.seeds])

    def repair(self, store: KVStore) -> None:
        store.verify(repair=True)

    def rebuild(self, store: KVStore) -> None:
        store.rebuild_index()

    def _change(
        self,
        seeds: frozenset[int] | None = None,
        states: dict[str, int] | None = None,
        sources: dict[str, tuple[str, tuple[int, ...]]] | None = None,
    ) -> None:
        now = self.ledger
        self.ledger = Ledger(
            now.seeds if seeds is None else seeds,
            now.states if states is None else states,
            now.sources if sources is None else sources,
        )
        self._told(self.ledger)


Step: TypeAlias = Callable[[Account, KVStore], None]
