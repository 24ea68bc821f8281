"""One namespace's chunks in a catalogue: most of them in a window file, newer ones in memory.

A request waits for a few new chunks at most. The rest are added in the background, and the prompt is
matched against what is there already. When the file lacks enough chunks, it is written anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Final

from semkv_rag.errors import SemKVError, StoreError
from semkv_rag.reuse import ChunkIndex, Span, TokenArray
from semkv_rag.reuse.base import Base
from semkv_rag.store import Changes, KVStore
from semkv_rag.store.files.beneath import remove_if_possible
from semkv_rag.store.files.paths import window_path
from semkv_rag.store.files.window_file import WindowFile, write_windows

logger = logging.getLogger(__name__)

TAKEN_AT_ONCE: Final = 1000
"""Chunks whose tokens are read at a time; look-ups come in between."""

TAKEN_BY_A_REQUEST: Final = 2000
"""New chunks that a look-up takes in itself."""

WORTH_A_FILE: Final = 10_000
"""Chunks that are not in the file, before it is written anew; and a share of those that are in it."""

_SHARE: Final = 0.05
_REST_S: Final = 0.001
"""Between two batches in the background, so that a look-up gets its turn."""

CLOSING_S: Final = 1.0
"""A look-up that takes longer is not waited for when the engine stops."""

WINDOW: Final = 8
"""Tokens of an indexed window: of a window file too."""


class Shelf:
    """One namespace's chunks. Look-ups come from one thread at a time; another catches up.

    Args:
        background: has work done in another thread.
        stopping: set when the engine stops.
    """

    def __init__(
        self,
        store: KVStore,
        model: str,
        namespace: str,
        background: Callable[[Callable[[], None]], object],
        stopping: threading.Event,
    ) -> None:
        self._store = store
        self._owner = (model, namespace)
        self._path = window_path(store.root, model, namespace)
        self._background = background
        self._stopping = stopping
        self._guard = threading.Lock()  # of all that follows
        self._index: ChunkIndex | None = None
        self._file: WindowFile | None = None
        self._seen = 0  # the last change that is taken in, or pending
        self._pending: dict[str, None] = {}
        self._bad: set[str] = set()
        self._opened = False
        self._working = False
        self._enough = WORTH_A_FILE  # chunks not in the file, before it is written anew

    @property
    def is_empty(self) -> bool:
        """Whether there is no chunk, and nothing to remember."""
        return self._index is None and not self._pending and not self._working

    def close(self) -> None:
        """Close the file, unless a look-up is still reading from it."""
        if self._guard.acquire(timeout=CLOSING_S):
            try:
                self._use(None, None)
            finally:
                self._guard.release()

    def load(self, until: float) -> None:
        """Take in what there is; beyond a time the rest is left to the background.

        Args:
            until: the time, by `time.monotonic`.

        Raises:
            StoreError: the store's index cannot be read.
        """
        with self._guard:
            self._refresh()
            while self._pending and time.monotonic() < until:
                self._take(TAKEN_AT_ONCE)
            self._catch_up()

    def find(self, prompt: TokenArray, bad: Iterable[str]) -> list[Span]:
        """The chunks in `prompt`, after what is new was taken in.

        Args:
            bad: chunks that are matched no more.

        Raises:
            StoreError: the store's index cannot be read; or nothing is found while chunks are still
                to be taken in.
        """
        with self._guard:
            self._refresh()
            self._take(TAKEN_BY_A_REQUEST)
            self._catch_up()
            self._bad.update(bad)
            if self._index is None:
                spans = []
            else:
                self._index.remove(bad)
                spans = self._index.match(prompt)
            if self._pending and not spans:
                raise StoreError(f"{len(self._pending)} of its chunks are still to be taken in")
        return spans

    # ---- what is new, with the guard held --------------------------------------------------------

    def _refresh(self) -> None:
        """Note what was stored, and take out what was removed since the last time."""
        if not self._opened:
            self._open()
        changes = self._store.changes(self._owner[0], self._seen, self._owner[1])
        if changes.reset:
            self._compare(changes)
        else:
            for added, group in groupby(changes.entries, key=lambda change: change.added):
                ids = [change.chunk_id for change in group]
                if added:
                    self._note(ids)
                else:
                    self._drop(ids)
        self._seen = changes.last
        if self._index is not None and not len(self._index) and not self._pending:
            self._use(None, None)
            if not self._store.read_only:
                remove_if_possible(self._path)

    def _note(self, ids: Sequence[str]) -> None:
        self._bad.difference_update(ids)  # stored anew
        self._pending.update(dict.fromkeys(ids))

    def _drop(self, ids: Sequence[str]) -> None:
        for id_ in ids:
            self._pending.pop(id_, None)
        if self._index is not None:
            self._index.remove(ids)

    def _compare(self, live: Changes) -> None:
        """Go by all live chunks: what changed meanwhile cannot be told."""
        ids = dict.fromkeys(change.chunk_id for change in live.entries)
        if self._index is not None:
            here = self._index.ids()
            self._index.remove([id_ for id_ in here if id_ not in ids])
            for id_ in here:
                ids.pop(id_, None)
        self._bad.difference_update(ids)
        self._pending = ids

    def _take(self, count: int) -> None:
        """Take in so many of what is pending, at most."""
        if self._stopping.is_set():
            raise StoreError("the engine is stopping")
        while count > 0 and (ids := list(islice(self._pending, min(count, TAKEN_AT_ONCE)))):
            stored = self._store.tokens(*self._owner, ids)
            if self._index is None and stored:
                self._index = self._new_index(None)
            if self._index is not None:
                self._index.add((id_, chunk.tokens) for id_, chunk in stored.items())
            for id_ in ids:
                del self._pending[id_]
            count -= len(ids)

    def _new_index(self, base: Base | None) -> ChunkIndex:
        return ChunkIndex(partial(self._store.tokens, *self._owner), window=WINDOW, base=base)

    # ---- the file ----------------------------------------------------------------------------------

    def _open(self) -> None:
        """Begin with the file, if there is one that can be used."""
        self._opened = True
        opened = self._opened_file()
        if opened is not None:
            self._use(*opened)

    def _opened_file(self) -> tuple[WindowFile, Base] | None:
        if not self._path.exists():
            return None
        try:
            file = WindowFile(self._path, *self._owner)
            try:
                file.verify()  # all of it: what is read later is not compared with any checksum
                return file, Base(file, WINDOW)
            except BaseException:
                file.close()
                raise
        except (SemKVError, ValueError) as error:
            logger.warning("semkv: %s is not used: %s", self._path, error)
            return None

    def _use(self, file: WindowFile | None, base: Base | None) -> None:
        """Begin anew, with a file's chunks or with none."""
        former, self._file = self._file, file
        self._index = None if base is None else self._new_index(base)
        if file is not None:
            self._seen = file.last_change
            self._enough = max(WORTH_A_FILE, round(_SHARE * len(base or ())))
        if former is not None:
            former.close()

    # ---- in the background, the guard held for a moment at a time ---------------------------------

    def _catch_up(self) -> None:
        """Have what is pending taken in, and the file written, if there is enough of it."""
        if not self._working and (self._pending or self._is_worth_a_file()):
            self._working = True
            self._background(self._work)

    def _is_worth_a_file(self) -> bool:
        index = self._index
        return index is not None and not self._store.read_only and index.beside_base >= self._enough

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._guard:
                    self._take(TAKEN_AT_ONCE)
                    done = not self._pending
                if done:
                    break
                time.sleep(_REST_S)
            self._write()
        except (SemKVError, OSError) as error:
            logger.warning("semkv: %s is not written: %s", self._path, error)
        except Exception:
            logger.exception("semkv: a catalogue could not catch up")
        finally:
            with self._guard:
                self._working = False

    def _write(self) -> None:
        """Write the file anew, or take the one that another process has written meanwhile."""
        with self._guard:
            if self._stopping.is_set() or self._pending or not self._is_worth_a_file():
                return
            assert self._index is not None
            make, last_change, former = self._index.pack(), self._seen, self._file
            self._enough *= 2  # should it fail
        opened = self._opened_file()
        if opened is None or (former is not None and opened[0].last_change <= former.last_change):
            if opened is not None:
                opened[0].close()
            sections = make()
            if sections is None or self._stopping.is_set():
                return
            write_windows(self._path, *self._owner, last_change, sections)
            del sections, make
            opened = self._opened_file()
        if opened is None:
            return
        with self._guard:
            # What came since is told by the next look at the store's changes.
            self._use(*opened)
            if self._index is not None:
                self._index.remove(self._bad)
