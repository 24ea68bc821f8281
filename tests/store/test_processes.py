"""Several processes that write, read, evict and verify one store at once, and some that are killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from semkv_rag.errors import ChunkFileError, StoreError
from semkv_rag.store import ChunkFile, KVStore
from tests.store import made
from tests.store.databases import BOTH_IN_SOAK

# Forked: a spawned one would import torch for seconds before it does anything.
processes = multiprocessing.get_context("fork")

SEEDS = 30


def open_and_write(root: Path, index_url: str | None, number: int, start: Barrier) -> None:
    start.wait()
    with KVStore(root, index_url=index_url) as store:
        store.add_model(f"m{number}", {})


def test_opening_a_new_store_at_once(tmp_path: Path, index_url: str | None) -> None:
    start = processes.Barrier(8)
    opening = [
        processes.Process(target=open_and_write, args=(tmp_path, index_url, number, start))
        for number in range(8)
    ]
    for process in opening:
        process.start()
    for process in opening:
        process.join()
    assert [process.exitcode for process in opening] == [0] * 8
    with KVStore(tmp_path, index_url=index_url) as store:
        assert len(store.models()) == 8


def use_the_store(root: Path, index_url: str | None, seed: int, outcome: Connection) -> None:
    """A random mix of everything, with what must hold checked on the way."""
    chance = random.Random(seed)
    live: set[str] = set()
    point = 0
    read = 0
    faults: list[str] = []
    try:
        with KVStore(root, index_url=index_url) as store:
            for _ in range(120):
                namespace = chance.choice(["a", "b"])
                action = chance.random()
                if action < 0.5:
                    key = made.write(
                        store, made.header(chance.randrange(SEEDS), namespace=namespace)
                    )
                    store.add([key])
                elif action < 0.65:
                    store.evict(chance.randrange(15_000), chance.choice([None, namespace]))
                elif action < 0.7:
                    assert store.verify(repair=chance.random() < 0.5).problems == ()
                elif action < 0.75:
                    store.put_source(made.MODEL, namespace, "doc", "d", list(live)[:5])
                ids = [record.id for record in store.chunks(namespace=namespace)]
                for id_ in chance.sample(ids, min(3, len(ids))):
                    try:
                        path = store.path(made.MODEL, namespace, id_)
                        with ChunkFile(path, model=made.MODEL, chunk_id=id_) as file:
                            file.verify()
                        read += 1
                    except ChunkFileError as error:
                        faults.append(str(error))
                try:
                    store.touch(ids[:2])
                except StoreError as error:  # as documented: it waits a second for the others
                    if "database is locked" not in str(error):
                        raise
                told = store.changes(made.MODEL, point)
                point = told.last
                live = set() if told.reset else live
                for entry in told.entries:
                    (live.add if entry.added else live.discard)(entry.chunk_id)
        assert all("is missing" in fault for fault in faults), "evicted files, never torn ones"
        outcome.send(("ok", read, point, live))
    except BaseException as error:
        outcome.send((repr(error), 0, 0, set()))
        raise


@pytest.mark.slow
@BOTH_IN_SOAK
@pytest.mark.timeout(300)
def test_everything_at_once(tmp_path: Path, index_url: str | None) -> None:
    running = []
    for seed in range(4):
        ours, theirs = processes.Pipe()
        process = processes.Process(
            target=use_the_store, args=(tmp_path, index_url, seed, theirs), daemon=True
        )
        process.start()
        running.append((process, ours))
    outcomes = [pipe.recv() for _, pipe in running]
    for process, _ in running:
        process.join()
    assert [outcome[0] for outcome in outcomes] == ["ok"] * 4
    assert all(read > 20 for _, read, _, _ in outcomes)
    with KVStore(tmp_path, index_url=index_url) as store:
        final = {record.id for record in store.chunks()}
        for _, _, point, live in outcomes:
            for entry in store.changes(made.MODEL, point).entries:
                (live.add if entry.added else live.discard)(entry.chunk_id)
            assert live == final, "who followed the changes knows what there is"
        report = store.verify()
        assert report.problems == ()
        assert report.notices == ()
        assert not list(tmp_path.rglob("*.tmp"))
        assert report.chunks == len(list(tmp_path.rglob("*.safetensors")))


def add_and_remove(root: Path, index_url: str | None, round_: int, told: Connection) -> None:
    """Tell `+id` once a chunk is promised, and `-id` before it may be taken away."""
    chance = random.Random(round_)
    mine: list[str] = []
    with KVStore(root, index_url=index_url) as store:
        for number in range(10_000):
            headers = [made.header(1000 * round_ + 3 * number + part) for part in range(3)]
            ids = sorted(store.add([made.write(store, header) for header in headers]))
            assert len(ids) == 3
            mine += ids
            told.send(("+", ids))
            store.put_source(made.MODEL, "default", f"doc{round_}", str(number), mine)
            if chance.random() < 0.5:
                told.send(("-", mine[:2]))
                store.remove(made.MODEL, "default", mine[:2])
                del mine[:2]


@pytest.mark.slow
@BOTH_IN_SOAK
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [15, pytest.param(200, marks=pytest.mark.soak)])
def test_writers_that_are_killed(tmp_path: Path, index_url: str | None, rounds: int) -> None:
    chance = random.Random(7)
    promised: set[str] = set()
    leftovers = 0
    for round_ in range(20 * rounds):
        if round_ >= rounds and leftovers:
            break  # on a busy machine few come to write before they are killed
        ours, theirs = processes.Pipe(duplex=False)
        writer = processes.Process(
            target=add_and_remove, args=(tmp_path, index_url, round_, theirs), daemon=True
        )
        writer.start()
        theirs.close()
        heard = [ours.recv() for _ in range(chance.randrange(3))]  # it came to write, mostly
        time.sleep(chance.uniform(0, 0.1))
        assert writer.pid is not None
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        with suppress(EOFError):
            while True:
                heard.append(ours.recv())
        for sign, ids in heard:
            (promised.update if sign == "+" else promised.difference_update)(ids)
        ours.close()
        with KVStore(tmp_path, index_url=index_url) as store:
            report = store.verify()
            assert report.problems == ()
            leftovers += len(report.notices)
            assert promised <= {record.id for record in store.chunks()}
    with KVStore(tmp_path, index_url=index_url) as store:
        store.verify(repair=True)
        assert store.verify().notices == ()
        assert promised <= {record.id for record in store.chunks()}
    assert leftovers, "some were killed half way"
