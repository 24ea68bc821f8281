"""A store whose files are in an object store: several machines write, find, read, remove and check."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semkv_rag.errors import ChunkFileError, ObjectStoreError, OptionError
from semkv_rag.store import ChunkHeader, ChunkKey, KVStore, place_of
from semkv_rag.store.objects.shared_files import SharedFiles
from tests.store import made
from tests.store.shared import Shared
from workbench import azure

pytestmark = pytest.mark.slow  # an object store and a database serve these


def put(store: KVStore, seed: int, **fields: object) -> ChunkHeader:
    header = made.header(seed, **fields)  # type: ignore[arg-type]
    store.write_chunk(header, made.layers(header, seed))
    assert store.add([key(header)]) == {header.id}
    return header


def key(header: ChunkHeader) -> ChunkKey:
    return ChunkKey(header.id, header.model, header.namespace)


def assert_same(store: KVStore, header: ChunkHeader, seed: int) -> None:
    """What a store has of a chunk is what was written."""
    with store.open_chunk(header.model, header.namespace, header.id) as file:
        for index, (keys, values) in enumerate(made.layers(header, seed)):
            found = file.layer(index)
            assert torch.equal(found[0], keys)
            assert torch.equal(found[1], values)


def files(store: KVStore) -> SharedFiles:
    found = store._contents.files
    assert isinstance(found, SharedFiles)
    return found


def test_another_machine_finds_and_reads_what_one_wrote(shared: Shared) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = put(one, 1)
        assert two.get(made.MODEL, "default", [header.id]).keys() == {header.id}
        assert_same(two, header, 1)
        # From then on it is in that machine's folder, as a store's own file.
        path = two.path(header.model, header.namespace, header.id)
        assert path.read_bytes() == one.path(*path_of(header)).read_bytes()
        assert files(two).cache.used_bytes == path.stat().st_size


def path_of(header: ChunkHeader) -> tuple[str, str, str]:
    return header.model, header.namespace, header.id


def test_nothing_is_promised_that_is_not_in_the_object_store(shared: Shared) -> None:
    with shared.open() as store:
        header = made.header(1)
        store.write_chunk(header, made.layers(header))
        files(store).objects.delete([files(store).key(store.path(*path_of(header)))])
        assert store.path(*path_of(header)).exists()
        assert store.add([key(header)]) == set()


def test_a_bucket_that_is_not_there_is_no_missing_chunk(shared: Shared) -> None:
    with shared.open() as store:
        header = put(store, 1)
    gone = replace(shared, url=re.sub(r"//[^/]+", "//semkv-no-such", shared.url))
    with (
        gone.open("another") as store,
        pytest.raises(ObjectStoreError, match="bucket is not there"),
    ):
        files(store).objects.read(files(store).key(store.path(*path_of(header))), 0, 8)


def test_what_is_removed_is_gone_everywhere(shared: Shared) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header, other = put(one, 1), put(one, 2)
        assert_same(two, header, 1)
        assert two.remove(made.MODEL, "default", [header.id]) == 1
        assert [info.key for info in files(one).objects.list("chunks")] == [
            files(one).key(one.path(*path_of(other)))
        ]
        assert not two.path(*path_of(header)).exists()
        # The other machine has a copy; what the index does not promise nobody asks for.
        assert one.get(made.MODEL, "default", [header.id]) == {}


def test_a_damaged_copy_is_fetched_anew(shared: Shared) -> None:
    with shared.open() as store:
        header = put(store, 1)
        path = store.path(*path_of(header))
        content = bytearray(path.read_bytes())
        content[-3] ^= 255
        path.write_bytes(content)
        assert_same(store, header, 1)
        assert path.read_bytes() != bytes(content)
        path.write_bytes(b"torn")
        assert_same(store, header, 1)


def test_a_damaged_object_is_damaged(shared: Shared) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header, sound = put(one, 1), put(one, 2)
        path = one.path(*path_of(header))
        content = bytearray(path.read_bytes())
        content[-3] ^= 255
        path.write_bytes(content)
        with path.open("rb") as file:
            files(one).objects.put(files(one).key(path), file)
        path.unlink()
        with (
            two.open_chunk(*path_of(header)) as opened,
            pytest.raises(ChunkFileError, match="checksum"),
        ):
            opened.verify()
        report = one.verify()
        assert [problem.kind for problem in report.problems] == ["damaged"]
        assert one.verify(repair=True).repaired
        assert [record.id for record in one.chunks()] == [sound.id]
        assert one.verify().ok


def test_an_object_that_is_not_there_is_missing(shared: Shared) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = put(one, 1)
        files(one).objects.delete([files(one).key(one.path(*path_of(header)))])
        with pytest.raises(ChunkFileError, match="missing in the object store"):
            two.open_chunk(*path_of(header))
        assert [problem.kind for problem in two.verify(repair=True).problems] == ["missing"]
        assert list(two.chunks()) == []


def test_all_ranks_are_there_or_none_is_promised(shared: Shared) -> None:
    with shared.open() as store:
        first, second = (made.header(1, rank=rank, world_size=2) for rank in range(2))
        store.write_chunk(first, made.layers(first))
        assert store.add([key(first)]) == set()
        store.write_chunk(second, made.layers(second))
        assert store.add([key(first)]) == {first.id}
        assert store.get(made.MODEL, "default", [first.id])[first.id].ranks == 2


def test_images_features_are_shared(shared: Shared) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        state = torch.rand(4, 8)
        one.states.put(made.MODEL, "default", "ab" * 32, state)
        loaded = two.states.load(made.MODEL, "default", "ab" * 32)
        assert loaded is not None and torch.equal(loaded, state)
        assert two.states.load(made.MODEL, "default", "cd" * 32) is None
        assert two.states.load(made.MODEL, "another", "ab" * 32) is None
        assert two.verify().states == 1


def test_garbage_goes_once_it_is_old(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no row promises may be another writer's, who is about to promise it."""
    with shared.open() as store:
        promised, young = put(store, 1), made.header(2)
        store.write_chunk(young, made.layers(young))
        report = store.verify(repair=True)
        assert report.ok
        assert [notice.kind for notice in report.notices] == ["orphan"]
        assert store.add([key(young)]) == {young.id}
        left = made.header(3)
        store.write_chunk(left, made.layers(left))
        monkeypatch.setattr("semkv_rag.store.upkeep.verify_objects.DEBRIS_AGE_S", -60.0)
        report = store.verify(repair=True)
        assert [notice.kind for notice in report.notices] == ["debris"]
        keys = {info.key for info in files(store).objects.list("chunks")}
        kept = {files(store).key(store.path(*path_of(one))) for one in (promised, young)}
        assert keys == kept


def test_a_lost_index_is_made_again_from_the_objects(shared: Shared) -> None:
    with shared.open("one") as one:
        headers = [put(one, seed) for seed in range(3)]
        one.states.put(made.MODEL, "default", "ab" * 32, torch.rand(4, 8))
        ranks = [made.header(9, rank=rank, world_size=2) for rank in range(2)]
        for header in ranks:
            one.write_chunk(header, made.layers(header))
        with one._database.writing() as connection:
            for table in ("chunk_tokens", "chunks", "states"):
                connection.exec_driver_sql(f"DELETE FROM {table}")  # noqa: S608
    with shared.open("two") as two:
        assert list(two.chunks()) == []
        two.rebuild_index()
        ids = {header.id for header in [*headers, ranks[0]]}
        assert {record.id for record in two.chunks()} == ids
        assert two.verify().ok
        assert len(list(two.states.records())) == 1


def test_a_folder_that_takes_nothing_stops_nobody(shared: Shared) -> None:
    """Writing goes through memory then, and so does reading."""
    for name in ("one", "two"):
        (shared.folder / name).mkdir()
        (shared.folder / name / "chunks").write_text("in the way")
    with shared.open("one") as one, shared.open("two") as two:
        header = put(one, 1)
        assert not one.path(*path_of(header)).exists()
        assert_same(two, header, 1)
        assert not two.path(*path_of(header)).exists()
        (shared.folder / "two" / "chunks").unlink()
        assert_same(two, header, 1)
        assert two.path(*path_of(header)).exists()


def test_a_full_disk_stops_nobody(shared: Shared) -> None:
    mount, unmount = shutil.which("mount"), shutil.which("umount")
    if not mount or not unmount or os.geteuid() != 0:
        pytest.skip("only root can mount")
    disk = shared.folder / "disk"
    disk.mkdir()
    if subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        with shared.open("disk") as one, shared.open("two") as two:
            with (disk / "filling").open("ab", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            headers = [put(one, seed) for seed in range(3)]
            assert not any(one.path(*path_of(header)).exists() for header in headers)
            for seed, header in enumerate(headers):
                assert_same(one, header, seed)
                assert_same(two, header, seed)
            (disk / "filling").unlink()
            assert_same(one, headers[0], 0)
            assert one.path(*path_of(headers[0])).exists()
    finally:
        subprocess.run([unmount, disk], check=True)


def test_the_folder_is_bounded_and_the_oldest_goes(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one:
        headers = [put(one, seed) for seed in range(12)]
        size = one.path(*path_of(headers[0])).stat().st_size
    with shared.open("two", cache_bytes=10 * size) as two:
        for age, header in enumerate(headers):
            assert_same(two, header, age)
            if (path := two.path(*path_of(header))).exists():
                os.utime(path, (1000 + age, 1000 + age))
            if (clearing := files(two).cache._clearing) is not None:
                clearing.join()
            there = [two.path(*path_of(one)).exists() for one in headers]
            assert sum(there) * size <= 10 * size
            assert files(two).cache.used_bytes == sum(there) * size
        assert there[-1]
        assert not there[0]
        # One that does not fit at all is read all the same.
    with shared.open("three", cache_bytes=size // 2) as three:
        assert_same(three, headers[0], 0)
        assert not three.path(*path_of(headers[0])).exists()
        put(three, 50)


def test_credentials_are_not_told(shared: Shared) -> None:
    with shared.open() as store:
        told = [repr(store), repr(files(store).objects), str(store.place), repr(store.place)]
        secrets = ("semkv-test", azure.ACCOUNT, azure.KEY)
        assert not [text for text in told if any(secret in text for secret in secrets)]
    with pytest.raises(OptionError, match="come from the environment") as raised:
        KVStore("s3://key:secret@bucket/prefix", index_url="sqlite://")
    assert "secret" not in str(raised.value).replace("AWS_SECRET_ACCESS_KEY", "")


def test_a_folder_named_by_a_file_url_is_an_object_store(tmp_path: Path) -> None:
    index = f"sqlite:///{tmp_path / 'index.sqlite'}"
    place = place_of(f"file://{tmp_path}/objects", cache_dir=tmp_path / "cache")
    with KVStore(place, index_url=index) as store:
        header, gone = put(store, 1), put(store, 2)
        (tmp_path / "objects" / files(store).key(store.path(*path_of(gone)))).unlink()
        more = put(store, 3)
        assert store.remove(made.MODEL, "default", [gone.id, more.id]) == 2
        assert len(list(files(store).objects.list("chunks"))) == 1
    other = place_of(f"file://{tmp_path}/objects", cache_dir=tmp_path / "other")
    with KVStore(other, index_url=index) as store:
        assert_same(store, header, 1)


FORKED = """
import os, sys
from semkv_rag.errors import ObjectStoreError
from semkv_rag.store.objects.objects import Objects, used_in_this_process
objects = Objects(sys.argv[1])
objects.require()
if os.fork() == 0:  # nothing was asked yet: the child may
    ok = objects.size("nothing") is None
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert not used_in_this_process()
assert objects.size("nothing") is None
assert used_in_this_process()
if os.fork() == 0:  # its threads are not here: to ask would be to wait for ever
    try:
        objects.size("nothing")
    except ObjectStoreError as error:
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(3)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""


def test_a_fork_of_a_process_that_used_it_is_refused(shared: Shared) -> None:
    done = subprocess.run([sys.executable, "-c", FORKED, shared.url], timeout=120)
    assert done.returncode == 0
