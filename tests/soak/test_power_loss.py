"""Lives that are drawn: faults, killed processes, and power that goes at any moment of it all."""

from __future__ import annotations

import random
import secrets
from contextlib import suppress
from pathlib import Path

import pytest

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore
from tests.store.disk import Disk, Model, watched
from tests.store.power_loss import check_after_loss, moments
from tests.store.promises import Account, Ledger

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]

LIVES = 10
PROCESSES = 4
STEPS = 10
LOSSES = 15


def a_step(chance: random.Random, account: Account, store: KVStore) -> None:
    seeds = range(8)
    match chance.randrange(12):
        case 0:
            account.evict(store)
        case 1:
            account.remove(store, *chance.sample(seeds, 2))
        case 2 | 3:
            listed = tuple(chance.sample(seeds, chance.randrange(4)))
            account.put_source(store, chance.choice("ab"), listed, str(chance.random()))
        case 4 | 5:
            account.put_state(store, chance.choice(["ab", "cd"]) * 32, chance.randrange(100))
        case 6:
            account.repair(store)
        case 7:
            account.rebuild(store)
        case 8:
            account.touch(store)
        case _:
            account.add(store, chance.choice(seeds))


def a_process(chance: random.Random, account: Account, disk: Disk, root: Path) -> None:
    """Some steps, until it ends or is killed; in some of them the disk is full for one call."""
    at = chance.randrange(200)
    with disk.die(at), KVStore(root) as store:
        for _ in range(STEPS):
            a_step(chance, account, store)
    with KVStore(root) as store:
        for _ in range(STEPS):
            with disk.fail(chance.randrange(20)), suppress(OSError, StoreError):
                a_step(chance, account, store)
            account.ledger.check(store)


def test_power_goes_in_lives_that_are_drawn(tmp_path: Path, rounds: int) -> None:
    for life in range(LIVES * rounds):
        seed = secrets.randbits(32)
        print(f"life {life}: seed {seed}")  # noqa: T201 - shown when it fails
        chance = random.Random(seed)
        top = tmp_path / str(life)
        top.mkdir()
        with watched(top) as disk:
            account = Account(disk.note)
            for _ in range(PROCESSES):
                a_process(chance, account, disk, top / "store")
        chosen = set(chance.sample(range(len(disk.calls)), LOSSES))
        for number, model, ledger in moments(disk):
            if number in chosen:
                loss = chance.choice(["all", random.Random(chance.random())])
                check_after_loss(model, ledger, tmp_path / "after", loss)
        check_end(disk, account.ledger, tmp_path / "after")


def check_end(disk: Disk, ledger: Ledger, place: Path) -> None:
    model = Model(disk.top)
    for call in disk.calls:
        model.add(call)
    check_after_loss(model, ledger, place, "all")
