"""Any order of uses, crashes and damage against a plain model of what a store promises."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from semkv_rag.store import ChunkFile, ChunkKey, KVStore
from tests.store import made

NAMESPACES = st.sampled_from(["a", "b"])
SEEDS = st.integers(0, 5)
RANKS = st.integers(1, 2)
NAMES = st.sampled_from(["doc", "page"])


class StoreMachine(RuleBasedStateMachine):
    """`promised` maps each chunk's namespace and id to its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="semkv-machine-"))
        self.store = KVStore(self.root)
        self.promised: dict[tuple[str, str], int] = {}
        self.written: dict[tuple[str, str], int] = {}
        self.damaged: set[tuple[str, str]] = set()
        self.unseen: set[tuple[str, str]] = set()  # damage that no header shows
        self.sources: dict[tuple[str, str], list[str]] = {}
        self.point = 0
        self.told: set[tuple[str, str]] = set()

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.root)

    # ---- adding ----

    def write(self, namespace: str, seed: int, ranks: int) -> ChunkKey:
        for rank in range(ranks):
            header = made.header(seed, namespace=namespace, rank=rank, world_size=ranks)
            key = made.write(self.store, header)
        return key

    @rule(namespace=NAMESPACES, seed=SEEDS, ranks=RANKS)
    def add(self, namespace: str, seed: int, ranks: int) -> None:
        key = self.write(namespace, seed, ranks)
        assert self.store.add([key]) == {key.id}
        chunk = namespace, key.id
        self.promised[chunk] = ranks
        self.written.pop(chunk, None)
        self.damaged.discard(chunk)
        self.unseen.discard(chunk)

    @rule(namespace=NAMESPACES, seed=SEEDS, ranks=RANKS)
    def write_only(self, namespace: str, seed: int, ranks: int) -> None:
        chunk = namespace, made.header(seed, namespace=namespace).id
        if chunk not in self.promised:
            self.write(namespace, seed, ranks)
            self.written[chunk] = ranks

    @rule(namespace=NAMESPACES, name=NAMES, seeds=st.lists(SEEDS, max_size=4))
    def put_source(self, namespace: str, name: str, seeds: list[int]) -> None:
        ids = [made.header(seed, namespace=namespace).id for seed in seeds]
        before = self.sources.get((namespace, name), [])
        self.sources[namespace, name] = ids
        gone = {(namespace, id_) for id_ in before} - self.listed()
        removed = self.store.put_source(made.MODEL, namespace, name, "digest", ids)
        assert removed == self.forget(gone)

    # ---- taking away ----

    def listed(self) -> set[tuple[str, str]]:
        return {(space, id_) for (space, _), ids in self.sources.items() for id_ in ids}

    def forget(self, chunks: set[tuple[str, str]]) -> int:
        there = chunks & self.promised.keys()
        for chunk in there:
            del self.promised[chunk]
        self.damaged -= there
        self.unseen -= there
        return len(there)

    @rule(namespace=NAMESPACES, name=NAMES)
    def remove_source(self, namespace: str, name: str) -> None:
        before = self.sources.pop((namespace, name), [])
        gone = {(namespace, id_) for id_ in before} - self.listed()
        assert self.store.remove_source(made.MODEL, namespace, name) == self.forget(gone)

    @rule(namespace=NAMESPACES, seeds=st.lists(SEEDS, max_size=3))
    def remove(self, namespace: str, seeds: list[int]) -> None:
        ids = {made.header(seed, namespace=namespace).id for seed in seeds}
        removed = self.store.remove(made.MODEL, namespace, ids)
        assert removed == self.forget({(namespace, id_) for id_ in ids})

    @rule(namespace=st.none() | NAMESPACES, size=st.integers(0, 20_000))
    def evict(self, namespace: str | None, size: int) -> None:
        gone = set(self.store.evict(size, namespace))
        assert sum(entry.bytes for entry in self.store.stats(namespace)) <= size
        chunks = {chunk for chunk in self.promised if chunk[1] in gone}
        assert len(chunks) == len(gone)
        assert namespace is None or all(chunk[0] == namespace for chunk in chunks)
        self.forget(chunks)

    @rule(namespace=NAMESPACES, seed=SEEDS)
    def touch(self, namespace: str, seed: int) -> None:
        self.store.touch([made.header(seed, namespace=namespace).id])

    # ---- what goes wrong ----

    @rule(
        namespace=NAMESPACES,
        seed=SEEDS,
        last=st.booleans(),
        how=st.sampled_from(["flip", "cut", "delete"]),
    )
    def damage(self, namespace: str, seed: int, last: bool, how: str) -> None:
        # Not drawn from what is promised: that is another time's chance, since crashes are.
        chunk = namespace, made.header(seed, namespace=namespace).id
        if chunk not in self.promised:
            return
        rank = self.promised[chunk] - 1 if last else 0
        path = self.store.path(made.MODEL, *chunk, rank)
        if not path.exists() or chunk in self.damaged:
            return
        if how == "flip":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            self.unseen.add(chunk)
        elif how == "cut":
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()
        self.damaged.add(chunk)

    @rule(namespace=NAMESPACES, seed=SEEDS, moment=st.floats(0, 0.02), adding=st.booleans())
    def crash(self, namespace: str, seed: int, moment: float, adding: bool) -> None:
        chunk = namespace, made.header(seed, namespace=namespace).id
        ranks = self.promised.get(chunk) or self.written.get(chunk, 1)
        if chunk in self.damaged or ranks != 1:
            return
        child = os.fork()
        if child == 0:
            try:
                if adding:
                    made.put(self.store, seed, namespace=namespace)
                else:
                    self.store.remove(made.MODEL, namespace, [chunk[1]])
            finally:
                os._exit(0)
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if self.store.get(made.MODEL, namespace, [chunk[1]]):
            assert adding or chunk in self.promised
            self.promised[chunk] = 1
            self.written.pop(chunk, None)
        else:
            assert not adding or chunk not in self.promised, "what was promised stays"
            self.forget({chunk})
            self.written.pop(chunk, None)
            if self.store.path(made.MODEL, *chunk).exists():
                with ChunkFile(self.store.path(made.MODEL, *chunk), model=made.MODEL) as file:
                    if file.header.world_size == 1:
                        self.written[chunk] = 1

    # ---- mending ----

    @rule()
    def verify(self) -> None:
        assert {problem.path.split("/")[-1][:64] for problem in self.store.verify().problems} == {
            chunk[1] for chunk in self.damaged
        }

    def after_repair(self) -> None:
        self.promised.update(self.written)
        self.written.clear()
        assert self.store.verify().ok == (not self.damaged)

    @rule()
    def repair(self) -> None:
        self.store.verify(repair=True)
        self.forget(set(self.damaged))
        self.after_repair()

    @rule(lost=st.booleans())
    def rebuild(self, lost: bool) -> None:
        if lost:
            self.store.close()
            for file in self.root.glob("index.sqlite*"):
                file.unlink()
            self.store = KVStore(self.root)
            self.sources.clear()
        self.store.rebuild_index()
        self.forget(self.damaged - self.unseen)
        self.after_repair()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = KVStore(self.root)

    # ---- what always holds ----

    @invariant()
    def promises_are_those_of_the_model(self) -> None:
        records = {(record.namespace, record.id): record.ranks for record in self.store.chunks()}
        assert records == self.promised
        for namespace in ("a", "b"):
            own = {record.id for record in self.store.chunks(namespace=namespace)}
            assert own == {id_ for space, id_ in self.promised if space == namespace}

    @invariant()
    def what_is_promised_is_sound(self) -> None:
        for chunk in self.promised.keys() - self.damaged:
            for rank in range(self.promised[chunk]):
                path = self.store.path(made.MODEL, *chunk, rank)
                with ChunkFile(path, model=made.MODEL, chunk_id=chunk[1]) as file:
                    assert (file.header.namespace, file.header.rank) == (chunk[0], rank)
                    file.verify()

    @invariant()
    def sources_are_those_of_the_model(self) -> None:
        listed = {(one.namespace, one.name): list(one.chunk_ids) for one in self.store.sources()}
        assert listed == self.sources

    @invariant()
    def who_follows_the_changes_knows_the_chunks(self) -> None:
        changes = self.store.changes(made.MODEL, self.point)
        self.point = changes.last
        if changes.reset:
            self.told.clear()
        for entry in changes.entries:
            chunk = entry.namespace, entry.chunk_id
            (self.told.add if entry.added else self.told.discard)(chunk)
        assert self.told == self.promised.keys()


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        StoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_a_few_orders() -> None:
    run(12, 25)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_orders() -> None:
    run(200 * int(os.environ.get("SOAK_ROUNDS", "1")), 60)
