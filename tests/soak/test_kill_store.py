"""A thousand times `kill -9` among processes that use one store at once: what was promised stays."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from semkv_rag.store import ChunkFile, KVStore
from semkv_rag.store.files.paths import temporary_files
from semkv_rag.store.files.tensor_writer import lock_abandoned
from semkv_rag.store.upkeep.verify import DEBRIS_AGE_S
from tests.store import made
from workbench import postgres

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
logger = logging.getLogger(__name__)  # shown with --log-cli-level=INFO

# Forked: a spawned one would import torch for seconds before it does anything.
processes = multiprocessing.get_context("fork")

KILLS = 1000
AT_ONCE = 3
KILLS_BETWEEN_CHECKS = 50
OWN = "own"
"""The namespace of chunks that only the process that wrote them removes."""
ANYBODYS = "anybody's"
"""The namespace whose few chunks and states all processes write, remove and evict."""

Told: TypeAlias = tuple[str, Any]


def use_the_store(root: Path, index_url: str | None, seed: int, told: Connection) -> None:
    """Use it in all ways until killed; tells what a call promised, and what one is about to remove."""
    torch.set_num_threads(1)
    try:
        with KVStore(root, index_url=index_url) as store:
            user = _User(store, seed, lambda *message: told.send(message))
            while True:
                user.do_something()
    except BaseException as error:
        told.send(("failed", repr(error)))
        raise


class _User:
    def __init__(self, store: KVStore, seed: int, tell: Callable[[str, Any], None]) -> None:
        self._store = store
        self._tell = tell
        self._chance = random.Random(seed)
        self._seed = seed
        self._made = 0
        self._mine: list[str] = []
        self._document: tuple[str, ...] = ()

    def do_something(self) -> None:
        actions: list[Callable[[], None]] = [
            *(self._add, self._add, self._put_source, self._remove, self._add_anybodys),
            *(self._add_anybodys, self._put_anybodys_source, self._put_anybodys_state),
            *(self._remove_anybodys, self._evict, self._repair),
        ]
        self._chance.choice(actions)()
        self._tell("did something", None)

    def _add(self) -> None:
        ids = []
        for _ in range(self._chance.randrange(1, 4)):
            self._made += 1
            ids.append(self._write(self._seed * 10_000 + self._made, OWN))
        self._mine += ids
        self._tell("promised", ids)

    def _put_source(self) -> None:
        """Its former chunks that are not among the new ones go."""
        kept = tuple(self._chance.sample(self._mine, min(len(self._mine), 6)))
        given_up = set(self._document) - set(kept)
        self._tell("given up", list(given_up))
        name = f"document {self._seed}"
        self._tell("document", (name, None))
        self._store.put_source(made.MODEL, OWN, name, str(self._made), kept)
        self._tell("document", (name, kept))
        self._document = kept
        self._mine = [id_ for id_ in self._mine if id_ not in given_up]

    def _remove(self) -> None:
        gone, self._mine = self._mine[:2], self._mine[2:]
        self._tell("given up", gone)
        self._store.remove(made.MODEL, OWN, gone)

    def _add_anybodys(self) -> None:
        self._write(self._chance.randrange(20), ANYBODYS)

    def _put_anybodys_source(self) -> None:
        seeds = self._chance.sample(range(20), 4)
        ids = [made.header(seed, namespace=ANYBODYS).id for seed in seeds]
        name = self._chance.choice("ab")
        self._store.put_source(made.MODEL, ANYBODYS, name, str(seeds), ids)

    def _put_anybodys_state(self) -> None:
        state = torch.rand(4, 8, generator=torch.Generator().manual_seed(self._made))
        self._store.states.put(made.MODEL, ANYBODYS, self._chance.choice("abcd") * 64, state)

    def _remove_anybodys(self) -> None:
        seeds = self._chance.sample(range(20), 3)
        ids = [made.header(seed, namespace=ANYBODYS).id for seed in seeds]
        self._store.remove(made.MODEL, ANYBODYS, ids)

    def _evict(self) -> None:
        self._store.evict(self._chance.randrange(20_000), ANYBODYS)

    def _repair(self) -> None:
        """Nothing is ever damaged, whoever is killed or writes meanwhile."""
        problems = self._store.verify(repair=True).problems
        assert problems == ()

    def _write(self, seed: int, namespace: str) -> str:
        """Some of anybody's chunks are of two ranks, so that one can be killed between them."""
        ranks = 2 if namespace == ANYBODYS and seed % 3 == 0 else 1
        for rank in range(ranks):
            header = made.header(seed, namespace=namespace, rank=rank, world_size=ranks)
            key = made.write(self._store, header)
        added = self._store.add([key])
        # Of what is anybody's, somebody may have removed it between the two.
        assert added == {key.id} or namespace == ANYBODYS
        return key.id


class _Account:
    """What calls that returned promised, and no later call began to take back."""

    def __init__(self) -> None:
        self.promises = 0
        self.chunks: set[str] = set()
        self.documents: dict[str, tuple[str, ...]] = {}

    def hear(self, told: Told) -> None:
        match told:
            case ("promised", ids):
                self.promises += len(ids)
                self.chunks.update(ids)
            case ("given up", ids):
                self.chunks.difference_update(ids)
            case ("document", (name, None)):
                self.documents.pop(name, None)
            case ("document", (name, ids)):
                self.documents[name] = ids
            case ("did something", None):
                pass
            case _:
                raise AssertionError(told)

    def check(self, store: KVStore) -> None:
        """What is owed is there, whole, and so is all that the index promises."""
        report = store.verify()
        assert report.problems == ()
        records = list(store.chunks())
        for record in records:
            for rank in range(record.ranks):
                path = store.path(record.model, record.namespace, record.id, rank)
                with ChunkFile(path, model=made.MODEL, chunk_id=record.id) as file:
                    file.verify()
        assert self.chunks <= {record.id for record in records if record.namespace == OWN}
        for name, ids in self.documents.items():
            source = store.source(made.MODEL, OWN, name)
            assert source is not None
            assert source.chunk_ids == ids


class _Running:
    """A process that uses the store, until it is killed."""

    def __init__(self, work: Callable[[Connection], None], account: _Account) -> None:
        self._account = account
        self._ours, theirs = processes.Pipe(duplex=False)
        self._process = processes.Process(target=work, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def wait(self) -> None:
        """Until it came to use the store."""
        assert self._ours.poll(60)

    def listen(self) -> None:
        while self._ours.poll():
            self._account.hear(self._ours.recv())

    def kill(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        with suppress(EOFError):  # it may have been killed within a message
            while True:
                self._account.hear(self._ours.recv())
        self._ours.close()
        assert self._process.exitcode == -signal.SIGKILL


def abandoned(root: Path) -> set[Path]:
    """The temporary files that killed processes left behind."""
    found = set()
    for path in temporary_files(root):
        with suppress(FileNotFoundError), path.open("rb") as file:
            if lock_abandoned(file.fileno()):
                found.add(path)
    return found


def set_old(paths: Iterable[Path]) -> None:
    """Have files be older than any that somebody may be writing."""
    long_ago = time.time() - 2 * DEBRIS_AGE_S
    for path in paths:
        with suppress(FileNotFoundError):
            os.utime(path, (long_ago, long_ago))


def assert_no_other_files(store: KVStore) -> None:
    promised = {
        store.path(record.model, record.namespace, record.id, rank)
        for record in store.chunks()
        for rank in range(record.ranks)
    }
    promised |= {
        store.states.path(record.model, record.namespace, record.key)
        for record in store.states.records()
    }
    assert set(store.root.rglob("*.safetensors")) == promised


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_thousand_kills(tmp_path: Path, database: str, rounds: int) -> None:
    own_file = nullcontext(None)
    with postgres.shared().schema() if database == "postgresql" else own_file as index_url:
        kill_and_check(tmp_path, index_url, KILLS * rounds)


def kill_and_check(root: Path, index_url: str | None, wanted: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    chance = random.Random(seed)
    account = _Account()
    number, kept = 0, 0
    left_behind: set[Path] = set()

    def start() -> _Running:
        nonlocal number
        number += 1
        return _Running(partial(use_the_store, root, index_url, number), account)

    kills = 0
    while kills < wanted:
        running = [start() for _ in range(AT_ONCE)]
        for _ in range(KILLS_BETWEEN_CHECKS - AT_ONCE):
            victim = running.pop(chance.randrange(AT_ONCE))
            if chance.random() < 0.8:
                victim.wait()
            time.sleep(chance.uniform(0, 0.1))
            if chance.random() < 0.2:
                set_old(temporary_files(root))  # live writers' files, too
            victim.kill()
            left_behind |= abandoned(root)
            for process in running:
                process.listen()
            running.append(start())
        for process in running:
            process.kill()
        kills += KILLS_BETWEEN_CHECKS
        kept += len(account.chunks)
        with KVStore(root, index_url=index_url) as store:
            account.check(store)
            set_old([*temporary_files(root), *root.rglob("*.safetensors")])
            store.verify(repair=True)
            assert list(root.rglob("*.tmp")) == []
            assert (store.verify().problems, store.verify().notices) == ((), ())
            account.check(store)
            assert_no_other_files(store)
            # The next ones begin with less, so that checking stays quick.
            store.remove(made.MODEL, OWN, [record.id for record in store.chunks(namespace=OWN)])
            account.chunks.clear()
    logger.info(
        "%d kills; %d chunks promised, %d of them never given up; %d files left behind half written",
        *(kills, account.promises, kept, len(left_behind)),
    )
    assert kept > kills / 5
    assert left_behind, "some were killed while they wrote a file"
