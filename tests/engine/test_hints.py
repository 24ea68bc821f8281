"""Hints: files of retrieved chunks are read ahead, unknown texts are stored; nobody waits for it."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus import precompute_texts
from semkv_rag.engine import Engine, hints
from semkv_rag.engine.hints import Hints
from semkv_rag.errors import OptionError
from workbench.settings import ENGINE_ARGS

KNOWN = (
    "The Ris tol library is led by Clara . It keeps nine hundred maps of the coast and a globe ."
)
UNKNOWN = (
    "The Fen gro mill is owned by Boris . Its wheel was made of oak in the year of the flood ."
)
OTHER = "The Dal mir ferry is steered by Ines . It crosses the bay six times a day with the mail ."


@pytest.fixture
def given(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hints]:
    """Hints on the session's engine, which store two texts each."""
    monkeypatch.setattr(hints, "QUIET_SECONDS", 0.1)
    assert engine._llm is not None and engine._capturer is not None
    made = Hints(engine._llm, engine._capturer, 2)
    yield made
    made.close()


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def stored(engine: Engine, namespace: str) -> int:
    assert engine.store is not None
    return len(list(engine.store.chunks(engine.fingerprint, namespace)))


def in_page_cache(path: Path) -> bool:
    """Whether every page of a file is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    try:
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), pages) == 0
    finally:
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return all(page & 1 for page in pages)


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_page_cache(path):
        pytest.skip("the files' system does not let go of a page")


def test_files_of_known_chunks_are_read_ahead(engine: Engine, given: Hints, namespace: str) -> None:
    precompute_texts(engine, [("library", [KNOWN])], namespace=namespace)
    assert engine.store is not None
    records = engine.store.chunks(engine.fingerprint, namespace)
    paths = [engine.store.path(engine.fingerprint, namespace, one.id) for one in records]
    for path in paths:
        drop_from_page_cache(path)
    given.give(["Title : Ris tol\n" + KNOWN], namespace)
    assert until(lambda: any(map(in_page_cache, paths)))
    assert stored(engine, namespace) == len(paths)


def test_unknown_texts_are_stored_and_then_found(
    engine: Engine, given: Hints, namespace: str
) -> None:
    precompute_texts(engine, [("library", [KNOWN])], namespace=namespace)
    assert stored(engine, namespace) == 2
    given.give([KNOWN, UNKNOWN, "too short", UNKNOWN], namespace)
    given.give([UNKNOWN], namespace)
    assert until(lambda: stored(engine, namespace) == 3)
    answer = engine.generate(
        f"Say : {UNKNOWN}", sampling={"max_tokens": 1}, reuse=ReuseOptions(namespace=namespace)
    )
    assert answer.report.kv_cache == "hit"
    assert engine.store is not None
    assert engine.store.sources(engine.fingerprint, namespace)[0].name == "library"


def test_no_more_than_wanted_of_one_hint(engine: Engine, given: Hints, namespace: str) -> None:
    given.give([KNOWN, UNKNOWN, OTHER], namespace)
    assert until(lambda: stored(engine, namespace) == 2)
    time.sleep(0.5)
    assert stored(engine, namespace) == 2


def test_nothing_is_stored_unless_it_was_switched_on(engine: Engine, namespace: str) -> None:
    engine.hint([UNKNOWN], namespace=namespace)
    time.sleep(1.5)
    assert stored(engine, namespace) == 0


def test_a_request_comes_first(engine: Engine, given: Hints, namespace: str) -> None:
    """While one is under way nothing is captured; what was begun is dropped, and done later."""
    endless = engine.stream("Question :", sampling={"max_tokens": 400, "ignore_eos": True})
    next(endless)
    given.give([UNKNOWN], namespace)
    for part in endless:
        assert part.finish_reason is not None or stored(engine, namespace) == 0
    assert until(lambda: stored(engine, namespace) == 1)


def test_hints_from_many_threads_return_at_once(
    engine: Engine, given: Hints, namespace: str
) -> None:
    waited = []

    def tell(number: int) -> None:
        for turn in range(100):
            began = time.perf_counter()
            given.give([f"{KNOWN} {number} {turn}"] * 8, namespace)
            waited.append(time.perf_counter() - began)

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(waited) == 800
    assert sorted(waited)[790] < 0.2  # of a busy machine; none waits for a text to be looked up
    given.close()
    assert given._thread is not None and not given._thread.is_alive()
    given.give([UNKNOWN], namespace)  # nothing, and no error


def test_what_cannot_be_followed_is_passed_over(
    engine: Engine, given: Hints, namespace: str
) -> None:
    given.give([UNKNOWN], "")  # no namespace
    given.give([UNKNOWN * 200], namespace)  # longer than the context window
    given.give([OTHER], namespace)
    assert until(lambda: stored(engine, namespace) == 1)


def test_the_option(reader: Path) -> None:
    for wrong in (-1, True, "2"):
        with pytest.raises(OptionError, match="store_retrieved"):
            Engine(str(reader), store_retrieved=wrong, **ENGINE_ARGS)  # type: ignore[arg-type]
