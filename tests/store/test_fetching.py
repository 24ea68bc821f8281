"""Files on their way from an object store: layers in their order, several ranges at once, in bounds."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semkv_rag.errors import ObjectStoreError
from semkv_rag.store import ChunkHeader, KVStore
from semkv_rag.store.files.beneath import file_bytes
from semkv_rag.store.files.paths import chunk_files, temporary_files
from semkv_rag.store.index import rest
from semkv_rag.store.objects import objects, waiting
from semkv_rag.store.objects.objects import READ_S, Objects, Part
from semkv_rag.store.objects.shared_files import SharedFiles
from semkv_rag.store.upkeep import contents
from tests.store import made
from tests.store.shared import Shared, environment, shared_store
from workbench import s3
from workbench.s3 import FaultProxy

pytestmark = pytest.mark.slow  # an object store and a database serve these

TOKENS = 4096
LAYERS = 48
"""A chunk of 6 MB: the first piece, and others."""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(s3.shared().port) as proxy:
        for name, value in environment(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        yield proxy


@pytest.fixture
def shared(tmp_path: Path, proxy: FaultProxy) -> Iterator[Shared]:
    with shared_store(tmp_path) as opened:
        yield opened


def files(store: KVStore) -> SharedFiles:
    found = store._contents.files
    assert isinstance(found, SharedFiles)
    return found


def path(store: KVStore, header: ChunkHeader) -> Path:
    return store.path(header.model, header.namespace, header.id)


def write(store: KVStore, seed: int, *, large: bool = False) -> ChunkHeader:
    header = made.header(seed, tokens=TOKENS, layers=LAYERS) if large else made.header(seed)
    store.write_chunk(header, made.layers(header, seed))
    return header


def when_reading(monkeypatch: pytest.MonkeyPatch, before: Callable[[int, int], None]) -> None:
    """Have something done before each range is asked for."""
    read = Objects.read

    def watched(self: Objects, key: str, begin: int, end: int) -> Part | None:
        before(begin, end)
        return read(self, key, begin, end)

    monkeypatch.setattr(Objects, "read", watched)


def test_the_first_layer_is_there_before_the_last(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = write(one, 1, large=True)
        size = path(one, header).stat().st_size
        assert size > 4 << 20
        go_on = threading.Event()
        when_reading(monkeypatch, lambda begin, end: None if end < size else go_on.wait(60) or None)
        wait = files(two).wait(60)
        with files(two).chunk(path(two, header), model=header.model, wait=wait) as file:
            layers = made.layers(header, 1)
            assert file.layer(0)[0].equal(layers[0][0])
            assert file.layer(LAYERS // 2)[0].equal(layers[LAYERS // 2][0])
            assert not path(two, header).exists()
            go_on.set()
            assert file.layer(LAYERS - 1)[1].equal(layers[-1][1])
            file.verify()
        assert path(two, header).stat().st_size == size
        assert list(temporary_files(two.root)) == []


def test_a_piece_that_does_not_come_is_given_up(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much comes of other files meanwhile."""
    with shared.open("one") as one, shared.open("two", fetch_timeout_ms=300) as two:
        header, others = write(one, 1, large=True), [write(one, seed) for seed in range(2, 6)]
        size, go_on = path(one, header).stat().st_size, threading.Event()
        when_reading(monkeypatch, lambda begin, end: None if end < size else go_on.wait(60) or None)
        wait = files(two).wait(60)
        with files(two).chunk(path(two, header), model=header.model, wait=wait) as file:
            file.layer(LAYERS // 2)
            wait._timeout_s = 0.3  # from the beginning on, which was a while ago
            for other in others:
                files(two).fetch(path(two, other), files(two).wait(60))
            with pytest.raises(ObjectStoreError, match="within 300 ms"):
                file.layer(LAYERS - 1)
        go_on.set()


def test_several_ranges_are_under_way_at_once(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = write(one, 1, large=True)
        together = threading.Barrier(3)  # it breaks where fewer are asked for at once
        when_reading(monkeypatch, lambda begin, end: begin and together.wait(60) and None)
        with two.open_chunk(header.model, header.namespace, header.id) as file:
            file.verify()
        assert not together.broken


def test_a_chunk_that_two_want_is_fetched_once(shared: Shared, proxy: FaultProxy) -> None:
    with shared.open("one") as one, shared.open("two") as two:
        header = write(one, 1)
        proxy.requests = 0
        waits = [files(two).wait(30), files(two).wait(30)]
        for wait in waits:
            files(two).expect([path(two, header)], wait)
        for wait in waits:
            with files(two).chunk(path(two, header), model=header.model, wait=wait) as file:
                file.verify()
        assert proxy.requests == 1


def test_who_waits_in_vain_stops_the_others_from_waiting(
    shared: Shared, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "REST_S", 1.0)
    with shared.open("one") as one, shared.open("two", fetch_timeout_ms=300) as two:
        headers = [write(one, seed) for seed in range(3)]

        def seconds(header: ChunkHeader, message: str) -> float:
            began = time.monotonic()
            with pytest.raises(ObjectStoreError, match=message):
                files(two).chunk(path(two, header), model=None, wait=files(two).wait())
            return time.monotonic() - began

        proxy.fault = "hanging"
        assert seconds(headers[0], "did not answer within 300 ms") >= 0.3
        began = time.monotonic()
        for header in headers[1:]:
            seconds(header, "it is asked again in")
        if time.monotonic() - began < 1.0:  # else the machine stood still, and one may have tried
            assert proxy.requests <= 5 + len(headers)
        proxy.fault = "none"
        until = time.monotonic() + 60
        while time.monotonic() < until:
            try:
                files(two).chunk(path(two, headers[1]), model=None, wait=files(two).wait()).close()
                break
            except ObjectStoreError:
                time.sleep(0.2)
        files(two).chunk(path(two, headers[1]), model=None, wait=files(two).wait()).close()


@pytest.mark.parametrize("fault", ["away", "error 500", "half bodies"])
def test_what_fails_at_once_is_said_at_once(
    shared: Shared, proxy: FaultProxy, fault: s3.Fault
) -> None:
    with shared.open("one") as one, shared.open("two", fetch_timeout_ms=60_000) as two:
        header = write(one, 1)
        proxy.fault = fault
        with pytest.raises(ObjectStoreError, match="the object store failed"):
            files(two).chunk(path(two, header), model=None, wait=files(two).wait())
        if fault != "half bodies":  # the answers to these have none
            with pytest.raises(ObjectStoreError):
                write(one, 2)
            with pytest.raises(ObjectStoreError):
                files(one).sizes([path(one, header)])
        proxy.fault = "none"
        with files(two).chunk(path(two, header), model=None, wait=files(two).wait()) as file:
            file.verify()
        assert list(temporary_files(two.root)) == []
        assert files(two).cache.used_bytes == path(two, header).stat().st_size


def test_the_pause_is_the_indexs() -> None:
    assert waiting.REST_S == rest.REST_S


PROGRAM = """
import sys
from tests.store import made
from semkv_rag.store import KVStore, place_of
url, index_url, folder, cache_bytes, first = sys.argv[1:]
place = place_of(url, cache_dir=folder, cache_bytes=int(cache_bytes))
with KVStore(place, index_url=index_url) as store:
    for turn in range(3):
        for seed in range(int(first), int(first) + 12):
            header = made.header(seed % 16)
            with store.open_chunk(header.model, header.namespace, header.id) as file:
                file.verify()
            store.write_chunk(made.header(100 + seed), made.layers(made.header(100 + seed)))
"""


def test_processes_share_a_folder_and_its_bound(shared: Shared) -> None:
    with shared.open("one") as one:
        headers = [write(one, seed) for seed in range(16)]
        size = path(one, headers[0]).stat().st_size
    most = 10 * size
    arguments = [shared.url, shared.index_url, str(shared.folder / "two"), str(most)]
    command = [sys.executable, "-c", PROGRAM, *arguments]
    programs = [subprocess.Popen([*command, str(first)]) for first in (0, 5, 11)]
    try:
        while any(program.poll() is None for program in programs):
            there = sum(sizes(shared.folder / "two"))
            # Beside what is being written: one file of each process.
            assert there <= most + 3 * size
            time.sleep(0.05)
    finally:
        for program in programs:
            program.kill()
    assert [program.wait() for program in programs] == [0, 0, 0]
    with shared.open("two", cache_bytes=most) as two:
        there = sum(sizes(shared.folder / "two"))
        assert there <= most
        assert files(two).cache.used_bytes >= there
        files(two).cache.clear()
        assert files(two).cache.used_bytes == sum(sizes(shared.folder / "two")) <= most
        assert list(temporary_files(two.root)) == []


def sizes(root: Path) -> list[int]:
    return [size for one in chunk_files(root) if (size := file_bytes(one)) is not None]


def test_who_adds_asks_an_object_store_that_failed_again(
    shared: Shared, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PAUSES_S", (0.1, 0.1))
    with shared.open("one") as one:
        header = write(one, 1)
        proxy.fault = "error 500"
        with pytest.raises(ObjectStoreError, match="the object store failed"):
            one.add([header])

        def recovers(pause_s: float) -> None:
            assert pause_s == 0.1
            proxy.fault = "none"

        monkeypatch.setattr(contents.time, "sleep", recovers)
        assert one.add([header]) == {header.id}
        assert [chunk.id for chunk in one.chunks()] == [header.id]


def test_who_adds_waits_for_a_slow_object_store_longer_than_a_request(
    shared: Shared, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "PAUSES_S", ())
    monkeypatch.setattr(FaultProxy, "SLOW_S", READ_S + 0.5)
    with shared.open("one") as one:
        header = write(one, 1)
        proxy.fault = "slow"
        assert one.add([header]) == {header.id}


def test_a_write_that_takes_too_long_is_tried_again(
    shared: Shared, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "WRITE_S", 1.0)
    with shared.open("one") as one:
        proxy.fault = "hanging"
        proxy.requests = 0
        timer = threading.Timer(1.5, lambda: setattr(proxy, "fault", "none"))
        timer.start()
        header = write(one, 1)
        timer.join()
        assert proxy.requests > 1
        assert one.add([header]) == {header.id}
