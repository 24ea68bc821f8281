"""Power goes, at every moment of a store's life: what calls promised is there afterwards, and whole."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from tests.store import made
from tests.store.disk import Disk, Loss, Model, watched
from tests.store.promises import Account, Ledger

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


def moments(disk: Disk) -> Iterator[tuple[int, Model, Ledger]]:
    """The disk behind each call, and what was owed then."""
    model, ledger = Model(disk.top), Ledger()
    for number, call in enumerate(disk.calls):
        if call.kind == "note":
            ledger = call.note
        else:
            yield number, model, ledger
            model.add(call)
    yield len(disk.calls), model, ledger


def check_after_loss(model: Model, ledger: Ledger, place: Path, loss: Loss) -> None:
    """A store that is opened on what the power left keeps its promises, and goes on."""
    place.mkdir()
    model.lose_power(place, loss)
    with KVStore(place / "store") as store:
        ledger.check(store)
        store.verify(repair=True)
        ledger.check(store)
        account = Account()
        account.add(store, 9)
        account.ledger.check(store)
    shutil.rmtree(place)


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
@pytest.mark.parametrize("loss", ["all", "drawn"])
def test_power_goes_behind_any_call(disk: Disk, tmp_path: Path, loss: str) -> None:
    for number, model, ledger in moments(disk):
        which: Loss = "all" if loss == "all" else random.Random(number)
        check_after_loss(model, ledger, tmp_path / str(number), which)
