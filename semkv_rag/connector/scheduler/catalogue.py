"""The catalogue: the stored chunks of a model and its adapters, ready to be matched.

It lives in the scheduler's process and asks the store's change feed at every request. So the next prompt
finds a chunk that another process has just stored. Threads of its own do this work: the scheduler does
not wait for them, and asks again later whether a look-up is done (`planner`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from semkv_rag.connector.scheduler.shelf import Shelf
from semkv_rag.connector.touching import Touches
from semkv_rag.errors import StoreError
from semkv_rag.reuse import Span, TokenArray
from semkv_rag.store import KVStore

THREADS = 4

LOADED_S = 2.0
"""An engine's start takes in what it can in this time; the rest is left to the background."""

SLOW_S = 1.0
"""A look-up takes milliseconds where little is new. Nobody waits behind one that takes longer."""


_Owner: TypeAlias = tuple[str, str]
"""A model and a namespace."""


class _Queue:
    """The look-ups of a model's namespace, which run one behind the other.

    Attributes:
        shelf: its chunks.
        waiting: the look-ups to come.
        busy_since: when the look-up began that is under way; None while there is none.
        bad: chunks that are matched no more, by order of others: the next look-up tells the shelf.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.waiting: deque[tuple[TokenArray, Future[list[Span]]]] = deque()
        self.busy_since: float | None = None
        self.bad: set[str] = set()


class Catalogue:
    """Finds stored chunks in prompts. For one thread, the scheduler's."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._queues: dict[_Owner, _Queue] = {}
        self._lock = threading.Lock()
        self._touches = Touches(store.touch)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="semkv-match")
        self._background = ThreadPoolExecutor(1, thread_name_prefix="semkv-catch-up")
        self._closed = threading.Event()

    def close(self) -> None:
        """Write down what was used, and stop."""
        self._closed.set()
        self._touches.close()
        for threads in (self._threads, self._background):
            threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            shelves = [queue.shelf for queue in self._queues.values()]
        for shelf in shelves:
            shelf.close()

    def load(self, model: str) -> None:
        """Take in what all of the model's namespaces have: the first requests need not wait for it.

        Where that takes more than two seconds the rest is done in the background.

        Raises:
            StoreError: the store's index cannot be read.
        """
        until = time.monotonic() + LOADED_S
        for namespace in self._store.namespaces(model):
            self._queue((model, namespace)).shelf.load(until)

    def find(self, model: str, namespace: str, prompt: TokenArray) -> Future[list[Span]]:
        """Look for the namespace's chunks in `prompt`.

        Returns:
            Those found, in prompt order, none overlapping another; or a `StoreError`: the store's index
            cannot be read, or an earlier look-up of the namespace takes too long.
        """
        asked: Future[list[Span]] = Future()
        owner = (model, namespace)
        with self._lock:
            queue = self._queue(owner)
            since = queue.busy_since
            if since is not None and time.monotonic() - since > SLOW_S:
                asked.set_exception(StoreError("it is being read since an earlier request"))
                return asked
            queue.waiting.append((prompt, asked))
            if since is None:
                self._begin(owner, queue)
        return asked

    def used(self, spans: Iterable[Span]) -> None:
        """Have the store know that these chunks are in use."""
        self._touches.note(span.chunk_id for span in spans)

    def forget(self, model: str, namespace: str, ids: Iterable[str]) -> None:
        """Match these chunks no more, because they are gone or their files are bad."""
        with self._lock:
            if (queue := self._queues.get((model, namespace))) is not None:
                queue.bad.update(ids)

    def _queue(self, owner: _Owner) -> _Queue:
        queue = self._queues.get(owner)
        if queue is None:
            shelf = Shelf(self._store, *owner, self._background.submit, self._closed)
            queue = self._queues[owner] = _Queue(shelf)
        return queue

    def _begin(self, owner: _Owner, queue: _Queue) -> None:
        """Have the next look-up done, in its turn among all namespaces'. Holds the lock."""
        queue.busy_since = time.monotonic()
        self._threads.submit(self._serve, owner, queue)

    # ---- in a thread of its own ------------------------------------------------------------------

    def _serve(self, owner: _Owner, queue: _Queue) -> None:
        with self._lock:
            queue.busy_since = time.monotonic()
            prompt, asked = queue.waiting.popleft()
            bad, queue.bad = queue.bad, set()
        if asked.set_running_or_notify_cancel():
            try:
                asked.set_result(queue.shelf.find(prompt, bad))
            except Exception as error:
                asked.set_exception(error)
        with self._lock:
            if queue.waiting and not self._closed.is_set():
                self._begin(owner, queue)
                return
            queue.busy_since = None
            if queue.shelf.is_empty:  # whatever namespaces are asked for, this does not grow
                del self._queues[owner]
