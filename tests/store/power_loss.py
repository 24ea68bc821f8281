"""The moments of a recorded life, and a store that is opened on what power left of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from semkv_rag.store import KVStore
from tests.store.disk import Disk, Loss, Model
from tests.store.promises import Account, Ledger


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


def check_after_loss(
    model: Model, ledger: Ledger, place: Path, loss: Loss, root: str = "store"
) -> None:
    """A store that is opened on what the power left keeps its promises, and goes on."""
    place.mkdir()
    model.lose_power(place, loss)
    with KVStore(place / root) as store:
        ledger.check(store)
        store.verify(repair=True)
        ledger.check(store)
        account = Account()
        account.add(store, 9)
        account.ledger.check(store)
    shutil.rmtree(place)
