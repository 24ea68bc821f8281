"""A file that comes from an object store, piece by piece, and is read while it comes."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from semkv_rag.errors import ObjectStoreError
from semkv_rag.store.objects.cache import LocalCache, NewFile
from semkv_rag.store.objects.objects import Part
from semkv_rag.store.objects.waiting import Answers

FIRST_BYTES: Final = 1 << 20
"""Bytes of the first piece: a file's header and its first layers."""
PIECE_BYTES: Final = 2 << 20
LEAST_BYTES_PER_S: Final = 50_000_000


class Landing:
    """One file; safe for threads.

    Args:
        make: makes the file that it is written to, when its size is known.
        cache: where that goes.

    Attributes:
        came_bytes: what came of it.
    """

    def __init__(self, make: Callable[[int], NewFile], cache: LocalCache) -> None:
        self._make, self._cache = make, cache
        self._changed = threading.Condition()
        self._new: NewFile | None = None
        self._size = 0
        self._pieces: list[tuple[int, int]] = []
        self._missing: set[int] = set()  # pieces
        self._unwritten: set[int] = set()  # as above, and a moment sooner
        self._fault: Exception | None = None
        self.came_bytes = 0

    @property
    def ended(self) -> bool:
        """Whether all of it is there, or never will be."""
        return self._fault is not None or (self._new is not None and not self._missing)

    def duplicate(self, wait: FileWait) -> int:
        """A descriptor of the file, once its size is known; the caller's own.

        Raises:
            FileNotFoundError: there is no such object.
            ObjectStoreError: it does not come, or not in time.
        """
        self._wait(lambda: self._new is not None, wait)
        assert self._new is not None
        return os.dup(self._new.descriptor)

    def require(self, begin: int, end: int, wait: FileWait) -> None:
        """Return when bytes `begin` to `end` are there.

        Raises:
            FileNotFoundError, ObjectStoreError: as above.
        """
        if not self._missing and self._fault is None:
            return
        wanted = {
            index
            for index, (first, last) in enumerate(self._pieces)
            if first < end and begin < last
        }
        self._wait(lambda: self._missing.isdisjoint(wanted), wait)

    def _wait(self, ready: Callable[[], bool], wait: FileWait) -> None:
        with self._changed:
            while not ready():
                if self._fault is not None:
                    raise self._fault
                left = wait.left_s()
                if left <= 0:
                    raise wait.in_vain()
                self._changed.wait(left)

    # ---- whoever fetches it ----------------------------------------------------------------

    def begin(self, part: Part) -> Sequence[tuple[int, int]]:
        """Take the first piece; the other pieces, which are to be fetched."""
        new = self._make(part.size)
        weakref.finalize(self, os.close, new.descriptor)
        count = len(part.content)
        rest = [
            (at, min(at + PIECE_BYTES, part.size)) for at in range(count, part.size, PIECE_BYTES)
        ]
        os.pwrite(new.descriptor, part.content, 0)
        if not rest:
            self._cache.keep(new)
        with self._changed:
            self._size, self._new = part.size, new
            self.came_bytes = count
            self._pieces = [(0, count), *rest]
            self._missing = set(range(1, len(rest) + 1))
            self._unwritten = set(self._missing)
            self._changed.notify_all()
        return rest

    def take(self, begin: int, part: Part | None) -> None:
        """Take another piece."""
        if part is None or part.size != self._size:
            self.fail(ObjectStoreError("an object was replaced while it was read"))
            return
        assert self._new is not None
        os.pwrite(self._new.descriptor, part.content, begin)
        index = [first for first, _ in self._pieces].index(begin)
        with self._changed:
            self._unwritten.discard(index)
            whole = not self._unwritten and self._fault is None
        if whole:  # whoever reads its end finds it in the folder
            self._cache.keep(self._new)
        with self._changed:
            self._missing.discard(index)
            self.came_bytes += len(part.content)
            self._changed.notify_all()

    def fail(self, fault: Exception) -> None:
        """It will not come."""
        with self._changed:
            first, self._fault = self._fault is None, self._fault or fault
            self._changed.notify_all()
        if first and self._new is not None:
            self._cache.give_up(self._new)


class FileWait:
    """What one request, or another task, waits for; safe for threads.

    The waiting is bounded: its files must come at `LEAST_BYTES_PER_S` or faster, and be `timeout_s` late
    at most. Slower than that, computing is as fast.

    Args:
        timeout_s: how late it may be.

    Attributes:
        order: smaller ones are served first.
        landings: the files that are fetched for it, by path: as long as it is held, so are they.
    """

    def __init__(self, answers: Answers, timeout_s: float, order: int) -> None:
        self._answers, self._timeout_s = answers, timeout_s
        self._lock = threading.Lock()
        self._began: float | None = None
        self.order = order
        self.landings: dict[Path, Landing] = {}

    def begin(self) -> None:
        """The object store is asked now, or was before: from the first time on the time counts.

        Raises:
            ObjectStoreError: it is left alone for now.
        """
        with self._lock:
            if self._began is None:
                self._answers.check()
                self._began = time.monotonic()

    def left_s(self) -> float:
        """How long what comes next may take."""
        assert self._began is not None
        came = sum(landing.came_bytes for landing in list(self.landings.values()))
        return self._began + self._timeout_s + came / LEAST_BYTES_PER_S - time.monotonic()

    def in_vain(self) -> ObjectStoreError:
        """The error of what did not come in time."""
        self._answers.silent()
        return ObjectStoreError(
            f"the object store did not answer within {self._timeout_s * 1000:.0f} ms"
        )
