"""The catalogue: the stored chunks of one model, ready to be matched, kept up with the store.

It lives in the scheduler's process. The store's change feed is asked at every request, so that a chunk
that another process has just stored is found by the next prompt. All of that is done by threads of its
own: the scheduler holds nobody up for it, and asks again whether a look-up is done (`planner`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from semkv_rag.connector.touching import Touches
from semkv_rag.errors import StoreError
from semkv_rag.reuse import ChunkIndex, Span, StoredTokens, TokenArray
from semkv_rag.store import KVStore

LOADED_AT_ONCE = 1000
THREADS = 4

SLOW_S = 1.0
"""A look-up takes milliseconds where little is new. Nobody waits behind one that takes longer."""


@dataclass
class _Shelf:
    """One namespace's chunks. Its look-ups run one behind the other.

    Attributes:
        seen: the last change that is taken in.
        index: None until there is a chunk.
        waiting: the look-ups to come.
        busy_since: when the look-up began that is under way; None while there is none. Only its thread
            touches `seen` and `index`.
        bad: chunks that are matched no more, by order of others: `index` drops them at the next look-up.
    """

    seen: int = 0
    index: ChunkIndex | None = None
    waiting: deque[tuple[TokenArray, Future[list[Span]]]] = field(default_factory=deque)
    busy_since: float | None = None
    bad: set[str] = field(default_factory=set)


class Catalogue:
    """Finds one model's stored chunks in prompts. For one thread, the scheduler's.

    Args:
        model: the fingerprint whose chunks are looked for.
    """

    def __init__(self, store: KVStore, model: str) -> None:
        self._store = store
        self._model = model
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()
        self._touches = Touches(store.touch)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="semkv-match")
        self._closed = threading.Event()

    def close(self) -> None:
        """Write down what was used, and stop."""
        self._closed.set()
        self._touches.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def load(self) -> None:
        """Take in what all namespaces have, so that the first requests need not wait for it.

        Raises:
            StoreError: the store's index cannot be read.
        """
        for namespace in {entry.namespace for entry in self._store.stats()}:
            self._refresh(namespace, self._shelves.setdefault(namespace, _Shelf()))

    def find(self, namespace: str, prompt: TokenArray) -> Future[list[Span]]:
        """Look for the namespace's chunks in `prompt`.

        Returns:
            Those found, in prompt order, none overlapping another; or a `StoreError`: the store's index
            cannot be read, or an earlier look-up of the namespace takes too long.
        """
        asked: Future[list[Span]] = Future()
        with self._lock:
            shelf = self._shelves.setdefault(namespace, _Shelf())
            since = shelf.busy_since
            if since is not None and time.monotonic() - since > SLOW_S:
                asked.set_exception(StoreError("it is being read since an earlier request"))
                return asked
            shelf.waiting.append((prompt, asked))
            if since is None:
                self._begin(namespace, shelf)
        return asked

    def used(self, spans: Iterable[Span]) -> None:
        """Have the store know that these chunks are in use."""
        self._touches.note(span.chunk_id for span in spans)

    def forget(self, namespace: str, ids: Iterable[str]) -> None:
        """Match these chunks no more, because they are gone or their files are bad."""
        with self._lock:
            if (shelf := self._shelves.get(namespace)) is not None:
                shelf.bad.update(ids)

    def _begin(self, namespace: str, shelf: _Shelf) -> None:
        """Have the next look-up of a shelf done, in its turn among all namespaces'. Holds the lock."""
        shelf.busy_since = time.monotonic()
        self._threads.submit(self._serve, namespace, shelf)

    # ---- in a thread of its own ------------------------------------------------------------------

    def _serve(self, namespace: str, shelf: _Shelf) -> None:
        with self._lock:
            shelf.busy_since = time.monotonic()
            prompt, asked = shelf.waiting.popleft()
        if asked.set_running_or_notify_cancel():
            try:
                asked.set_result(self._look_up(namespace, shelf, prompt))
            except Exception as error:
                asked.set_exception(error)
        with self._lock:
            if shelf.waiting and not self._closed.is_set():
                self._begin(namespace, shelf)
                return
            shelf.busy_since = None
            if shelf.index is None:  # whatever namespaces are asked for, this does not grow
                del self._shelves[namespace]

    def _look_up(self, namespace: str, shelf: _Shelf, prompt: TokenArray) -> list[Span]:
        self._refresh(namespace, shelf)
        if shelf.index is None:
            return []
        with self._lock:
            bad, shelf.bad = shelf.bad, set()
        if bad:
            shelf.index.remove(bad)
        return shelf.index.match(prompt)

    def _refresh(self, namespace: str, shelf: _Shelf) -> None:
        """Take in what was stored and removed since the last time."""
        changes = self._store.changes(self._model, shelf.seen, namespace)
        if changes.reset:
            shelf.index = None
        for added, group in groupby(changes.entries, key=lambda change: change.added):
            ids = [change.chunk_id for change in group]
            if added:
                self._add(namespace, shelf, ids)
            elif shelf.index is not None:
                shelf.index.remove(ids)
        shelf.seen = changes.last

    def _add(self, namespace: str, shelf: _Shelf, ids: Sequence[str]) -> None:
        if shelf.index is None:
            shelf.index = ChunkIndex(partial(self._store.tokens, self._model, namespace))
        for first in range(0, len(ids), LOADED_AT_ONCE):
            if self._closed.is_set():
                raise StoreError("the engine is stopping")
            stored: Mapping[str, StoredTokens] = self._store.tokens(
                self._model, namespace, ids[first : first + LOADED_AT_ONCE]
            )
            shelf.index.add((id, chunk.tokens) for id, chunk in stored.items())
