"""Power goes, at every moment of a store's life: what calls promised is there afterwards, and whole."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.store import made
from tests.store.disk import Disk, Model, watched
from tests.store.power_loss import check_after_loss, moments
from tests.store.promises import NAMESPACE, Account, Ledger, key_of

KEY, OTHER = "ab" * 32, "cd" * 32


def a_life(account: Account, store: KVStore) -> None:
    """Each thing that a store does, at least once."""
    account.add(store, 1)
    account.add(store, 2)
    account.put_source(store, "doc", (1, 2), "first")
    account.put_state(store, KEY, 1)
    account.touch(store)
    account.add(store, 3)
    account.put_source(store, "doc", (2, 3), "second")
    account.put_state(store, KEY, 2)
    account.put_state(store, OTHER, 3)
    account.add(store, 2)
    account.remove(store, 3)
    made.write(store, made.header(4))
    account.repair(store)
    account.add(store, 3)
    account.evict(store)
    account.add(store, 5)


def worst_moments(disk: Disk) -> Iterator[tuple[int, Model, Ledger]]:
    """Those behind which all that is not synced was lost, each such loss once."""
    before: Ledger | None = None
    for number, model, ledger in moments(disk):
        if ledger is not before or disk.calls[number - 1].kind in ("sync", "commit"):
            yield number, model, ledger
        before = ledger


def recorded(top: Path, life: Callable[[Account, KVStore], None]) -> Disk:
    """The calls of a life that began with an empty folder."""
    top.mkdir()
    with watched(top) as disk, KVStore(top / "store") as store:
        life(Account(disk.note), store)
    return disk


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Disk:
    return recorded(tmp_path_factory.mktemp("life") / "disk", a_life)


def test_the_record_is_of_all_that_was_written(disk: Disk) -> None:
    """Else the store changes files by calls that `tests/store/disk.py` does not watch."""
    *_, (_, model, _) = moments(disk)
    there = {
        str(path.relative_to(disk.top)): None if path.is_dir() else path.read_bytes()
        for path in disk.top.rglob("*")
        if not path.name.startswith("index.sqlite")
    }
    assert model.tree() == there


def test_only_what_may_be_lost_is_not_synced(disk: Disk) -> None:
    commits = [call.durable for call in disk.calls if call.kind == "commit"]
    assert commits.count(False) == 1, "that of `touch`"
    assert commits.count(True) > 10


@pytest.mark.slow
def test_power_goes_and_takes_all_that_was_not_synced(disk: Disk, tmp_path: Path) -> None:
    for number, model, ledger in worst_moments(disk):
        check_after_loss(model, ledger, tmp_path / str(number), "all")


@pytest.mark.slow
def test_power_goes_and_takes_some_of_it(disk: Disk, tmp_path: Path) -> None:
    for number, model, ledger in islice(moments(disk), 0, None, 4):
        check_after_loss(model, ledger, tmp_path / str(number), random.Random(number))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mended_by",
    [
        "repair",
        pytest.param("the same again", marks=pytest.mark.soak),
        pytest.param("rebuild", marks=pytest.mark.soak),
    ],
)
def test_power_goes_after_another_process_went_on(tmp_path: Path, mended_by: str) -> None:
    """A process is killed in each call, another one goes on with its files, then power goes."""
    number, died = 0, True
    while died:
        top = tmp_path / f"{number}"
        top.mkdir()
        account = Account()
        with watched(top) as disk:
            with disk.die(number), KVStore(top / "deep" / "store") as store:
                account.add(store, 1)
                account.put_state(store, KEY, 1)
            died = disk.count > number
            with KVStore(top / "deep" / "store") as store:
                if mended_by == "repair":
                    account.repair(store)
                elif mended_by == "rebuild":
                    account.rebuild(store)
                else:
                    account.add(store, 1)
                    account.put_state(store, KEY, 1)
            model = Model(top)
            for call in disk.calls:
                model.add(call)
        owed = account.ledger
        with KVStore(top / "deep" / "store") as store:
            # Whatever the second process promised is owed too.
            if store.get(made.MODEL, NAMESPACE, [key_of(1).id]):
                owed = replace(owed, seeds=frozenset({1}))
            if store.states.has(made.MODEL, NAMESPACE, KEY):
                owed = replace(owed, states={KEY: 1})
        check_after_loss(model, owed, tmp_path / f"{number}-after", "all", "deep/store")
        number += 1
    assert number > 20
