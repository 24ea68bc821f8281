"""Every call that changes the disk fails once, in each thing that a store does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore
from tests.store import made
from tests.store.databases import BOTH_IN_SOAK
from tests.store.disk import Disk, watched
from tests.store.promises import Account, Step

KEY = "ab" * 32


def nothing(_account: Account, _store: KVStore) -> None:
    """Nothing needs to be there."""


def two_chunks_and_a_state(account: Account, store: KVStore) -> None:
    account.add(store, 1)
    account.add(store, 2)
    account.put_state(store, KEY, 1)


def a_document(account: Account, store: KVStore) -> None:
    two_chunks_and_a_state(account, store)
    account.put_source(store, "doc", (1, 2), "first")


def a_file_that_nobody_promised(account: Account, store: KVStore) -> None:
    two_chunks_and_a_state(account, store)
    made.write(store, made.header(3))


def the_document_changes(account: Account, store: KVStore) -> None:
    account.add(store, 3)
    account.put_source(store, "doc", (2, 3), "second")


STEPS: dict[str, tuple[Step, Step]] = {
    "a first chunk": (nothing, lambda account, store: account.add(store, 1)),
    "a chunk again": (two_chunks_and_a_state, lambda account, store: account.add(store, 1)),
    "a document": (
        two_chunks_and_a_state,
        lambda account, store: account.put_source(store, "doc", (1, 2), "first"),
    ),
    "another version": (a_document, the_document_changes),
    "remove": (two_chunks_and_a_state, lambda account, store: account.remove(store, 1, 2)),
    "a state": (nothing, lambda account, store: account.put_state(store, KEY, 1)),
    "another state": (
        two_chunks_and_a_state,
        lambda account, store: account.put_state(store, KEY, 2),
    ),
    "evict": (two_chunks_and_a_state, Account.evict),
    "repair": (a_file_that_nobody_promised, Account.repair),
    "rebuild": (a_file_that_nobody_promised, Account.rebuild),
    "touch": (two_chunks_and_a_state, Account.touch),
}


def tried_with_a_fault(disk: Disk, number: int, do: Callable[[], None]) -> bool:
    """Whether call `number` was reached, and failed."""
    with disk.fail(number):
        try:
            do()
        except (OSError, StoreError):
            if disk.count <= number:
                raise
    return disk.count > number


@pytest.mark.slow
@BOTH_IN_SOAK
@pytest.mark.parametrize("name", STEPS)
def test_a_fault_loses_no_promise_and_the_next_try_works(
    tmp_path: Path, index_url: str | None, name: str
) -> None:
    prepare, step = STEPS[name]
    root = tmp_path / "store"
    number, failed = 0, True
    with watched(tmp_path) as disk, KVStore(root, index_url=index_url) as store:
        while failed:
            account = Account()
            prepare(account, store)
            failed = tried_with_a_fault(disk, number, partial(step, account, store))
            account.ledger.check(store)
            assert list(root.rglob("*.tmp")) == []
            step(account, store)
            account.ledger.check(store)
            store.verify(repair=True)
            assert store.verify().notices == ()
            # The next one begins without anything, folders included.
            store.evict(0)
            store.remove_source(made.MODEL, "default", "doc")
            for folder in ("chunks", "states"):
                shutil.rmtree(root / folder, ignore_errors=True)
            number += 1
    assert number > 1


@pytest.mark.slow
def test_a_fault_while_a_store_is_made(tmp_path: Path) -> None:
    number, failed = 0, True
    while failed:
        top = tmp_path / str(number)
        top.mkdir()
        root = top / "deep" / "store"
        with watched(top) as disk:
            failed = tried_with_a_fault(disk, number, lambda: KVStore(root).close())  # noqa: B023
        account = Account()
        with KVStore(root) as store:
            account.add(store, 1)
            account.ledger.check(store)
        number += 1
    assert number > 3
