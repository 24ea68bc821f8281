"""A disk that is full to the last byte: taking away works all the same, and then adding does."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore, SourceInfo
from tests.store import made

KEY = "ab" * 32
CHUNKS = 130
MOUNTS = {
    "tmpfs": ["-t", "tmpfs", "-o", "size=32m", "tmpfs"],
    "ext4": ["-o", "loop"],
}


@pytest.fixture(params=list(MOUNTS))
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    mount, unmount, mkfs = (shutil.which(name) for name in ("mount", "umount", "mkfs.ext4"))
    if not mount or not unmount or os.geteuid() != 0:
        pytest.skip("only root can mount")
    place = tmp_path / "disk"
    place.mkdir()
    arguments = list(MOUNTS[request.param])
    if request.param == "ext4":
        if not mkfs:
            pytest.skip("there is no mkfs.ext4")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(48 << 20)
        subprocess.run([mkfs, "-q", "-m", "0", image], check=True)
        arguments.append(str(image))
    if subprocess.run([mount, *arguments, place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield place
    finally:
        subprocess.run([unmount, place], check=True)


def fill(disk: Path) -> None:
    """Take all space, to the last byte."""
    with (disk / "filling").open("ab", buffering=0) as file:
        for size in (1 << 20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue


def add_until_full(store: KVStore, seed: int) -> None:
    def add() -> None:
        for number in range(seed, seed + 5000):
            made.put(store, number)

    with pytest.raises((OSError, StoreError)):
        add()


def stored_files(store: KVStore) -> int:
    return len(list(store.root.rglob("*.safetensors")))


def evict(store: KVStore) -> None:
    assert len(store.evict(0)) == CHUNKS + 1


def remove(store: KVStore) -> None:
    ids = [record.id for record in store.chunks()]
    assert store.remove(made.MODEL, "default", ids) == CHUNKS
    assert store.states.remove([state.id for state in store.states.records()]) == 1


def remove_source(store: KVStore) -> None:
    (source,) = store.sources()
    assert isinstance(source, SourceInfo)
    assert store.remove_source(source.model, source.namespace, source.name) == CHUNKS
    assert store.sources() == []
    store.evict(0, kind="state")


def verify(store: KVStore) -> None:
    for path in store.root.rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.write(b"\xff")
    report = store.verify(repair=True)
    assert len(report.problems) == CHUNKS + 1
    assert store.verify().ok


@pytest.mark.slow
@pytest.mark.parametrize("opened", ["before", pytest.param("after", marks=pytest.mark.soak)])
@pytest.mark.parametrize("free", [evict, remove, remove_source, verify])
def test_taking_away(disk: Path, free: Callable[[KVStore], None], opened: str) -> None:
    store = KVStore(disk / "store")
    keys = [made.write(store, made.header(seed)) for seed in range(CHUNKS)]
    ids = store.add(keys)
    store.put_source(made.MODEL, "default", "doc", "d", sorted(ids))
    store.states.put(made.MODEL, "default", KEY, torch.rand(4, 8))
    if opened == "after":
        store.close()
    fill(disk)
    if opened == "after":
        store = KVStore(disk / "store")
    with store:
        add_until_full(store, CHUNKS)
        # What adding found room for, and the file that was written and not promised.
        store.remove(made.MODEL, "default", {record.id for record in store.chunks()} - ids)
        for path in disk.rglob("chunks/**/*.safetensors"):
            if path.name.split(".")[0] not in ids:
                path.unlink()
        fill(disk)
        free(store)
        assert list(store.chunks()) == []
        assert list(store.states.records()) == []
        assert stored_files(store) == 0
        (disk / "filling").unlink()
        assert store.add([made.write(store, header) for header in map(made.header, range(9))])
        assert store.verify().ok
        store.evict(0)
        fill(disk)
        assert store.evict(0) == [], "and once more"


def test_adding_leaves_the_reserve_alone(disk: Path) -> None:
    with KVStore(disk / "store") as store:
        made.put(store, 1)
        fill(disk)
        add_until_full(store, 2)
        assert (store.root / "index.sqlite.reserve").stat().st_size >= 1 << 20
        fill(disk)
        kept = {record.id for record in store.chunks()}
        assert store.verify().ok
        assert set(store.evict(0)) == kept
