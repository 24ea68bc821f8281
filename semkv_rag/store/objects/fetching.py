"""Files are fetched by a few threads: headers and first layers first, whole blends in their order."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import PriorityQueue
from typing import Final

from semkv_rag.errors import ObjectStoreError, SemKVError
from semkv_rag.store.objects.cache import LocalCache, in_memory
from semkv_rag.store.objects.landing import FIRST_BYTES, FileWait, Landing
from semkv_rag.store.objects.objects import Objects
from semkv_rag.store.objects.waiting import Answers

logger = logging.getLogger(__name__)

THREADS: Final = 16


class Fetching:
    """Fetches files from the object store; one per open store, safe for threads.

    Args:
        root: the folder of the cache, below which files have the objects' names.
        on_thread: called first in each thread.
    """

    def __init__(
        self, objects: Objects, cache: LocalCache, root: Path, on_thread: Callable[[], None]
    ) -> None:
        self._objects, self._cache, self._root = objects, cache, root
        self._on_thread = on_thread
        self._lock = threading.Lock()
        self._under_way: dict[Path, Landing] = {}
        self._counter = itertools.count()
        self._orders = itertools.count()
        # A request's order, how far into the file, and in which order they came.
        self._todo: PriorityQueue[tuple[int, float, int, Callable[[], None]]] = PriorityQueue()
        self._threads: list[threading.Thread] = []
        self.answers = Answers()

    def wait(self, timeout_s: float) -> FileWait:
        """A wait for a request's files, which are fetched behind those of earlier requests."""
        return FileWait(self.answers, timeout_s, next(self._orders))

    def _submit(self, work: Callable[[], None], wait: FileWait) -> None:
        """Have one of the threads do something, before any later pieces."""
        with self._lock:
            while len(self._threads) < THREADS:
                name = f"semkv-fetch-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._todo.put((wait.order, -1.0, next(self._counter), work))

    def fetch(self, path: Path, wait: FileWait) -> Landing:
        """A file on its way; one that is on its way already is not fetched twice.

        Raises:
            ObjectStoreError: the object store is left alone for now.
        """
        wait.begin()
        new = False
        with self._lock:
            landing = self._under_way.get(path)
            if landing is None or landing.ended:
                landing = Landing(partial(self._cache.new_file, path), self._cache)
                self._under_way[path] = landing
                new = True
        wait.landings[path] = landing
        if new:
            self._submit(partial(self._begin, path, landing, wait), wait)
        return landing

    def fetch_apart(self, path: Path, wait: FileWait) -> Landing:
        """As `fetch`, into memory, whatever is in the cache; for checking."""
        wait.begin()
        landing = Landing(in_memory, self._cache)
        wait.landings[path] = landing
        self._submit(partial(self._begin, path, landing, wait), wait)
        return landing

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            for _ in self._threads:
                self._todo.put((-1, -1.0, next(self._counter), _end))
            self._threads.clear()

    def _begin(self, path: Path, landing: Landing, wait: FileWait) -> None:
        key = str(path.relative_to(self._root))

        def fetch_first() -> None:
            part = self._objects.read(key, 0, FIRST_BYTES)
            self.answers.received()
            if part is None:
                raise FileNotFoundError(key)
            for begin, end in landing.begin(part):
                place = (wait.order, begin / part.size, next(self._counter))
                work = partial(self._fetch_piece, path, key, landing, begin, end)
                self._todo.put((*place, work))

        self._guarded(path, landing, fetch_first)

    def _fetch_piece(self, path: Path, key: str, landing: Landing, begin: int, end: int) -> None:
        def fetch() -> None:
            part = self._objects.read(key, begin, end)
            self.answers.received()
            landing.take(begin, part)

        if not landing.ended:  # another piece of it failed
            self._guarded(path, landing, fetch)

    def _guarded(self, path: Path, landing: Landing, fetch: Callable[[], None]) -> None:
        try:
            fetch()
        except (SemKVError, FileNotFoundError) as fault:
            landing.fail(fault)
        except Exception as error:
            logger.exception("A file could not be fetched from the object store")
            landing.fail(ObjectStoreError(f"the file could not be fetched: {error!r}"))
        if landing.ended:
            with self._lock:
                if self._under_way.get(path) is landing:
                    del self._under_way[path]

    def _work(self) -> None:
        self._on_thread()
        while True:
            work = self._todo.get()[-1]
            if work is _end:
                return
            work()
            del work  # it holds a file open


def _end() -> None:
    """Ends a thread."""
