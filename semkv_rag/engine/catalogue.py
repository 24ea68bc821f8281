"""The catalogue: the stored chunks of one model, ready to be matched, kept up with the store.

It lives in the scheduler's process. The store's change feed is asked at every request, so that a chunk
that another process has just stored is found by the next prompt. All of that is done by threads of its
own: a namespace with much that is new, or an index that does not answer, holds up the scheduler once, for
`WAIT_S` at most. Until it is read the namespace's requests are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

from semkv_rag.engine.touching import Touches
from semkv_rag.errors import StoreError
from semkv_rag.reuse import ChunkIndex, Span, StoredTokens, TokenArray
from semkv_rag.store import KVStore

LOADED_AT_ONCE = 1000
THREADS = 4

WAIT_S = 1.0
"""What a request waits for its look-up. A look-up takes milliseconds where little is new."""


@dataclass
class _Shelf:
    """One namespace's chunks.

    Attributes:
        seen: the last change that is taken in.
        index: None until there is a chunk.
        running: the look-up under way, or the last one; nobody else touches `seen` and `index` meanwhile.
        bad: chunks that are matched no more, by order of others: `index` drops them at the next look-up.
    """

    seen: int = 0
    index: ChunkIndex | None = None
    running: Future[list[Span]] | None = None
    bad: set[str] = field(default_factory=set)


class Catalogue:
    """Finds one model's stored chunks in prompts. For one thread: the scheduler's.

    Args:
        model: the fingerprint whose chunks are looked for.
        wait_s: what `match` waits at most.
    """

    def __init__(self, store: KVStore, model: str, *, wait_s: float = WAIT_S) -> None:
        self._store = store
        self._model = model
        self._wait_s = wait_s
        self._shelves: dict[str, _Shelf] = {}
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

    def match(self, namespace: str, prompt: TokenArray) -> list[Span]:
        """The namespace's chunks in `prompt`, in prompt order, none overlapping another.

        Raises:
            StoreError: the store's index cannot be read, or not in time.
        """
        shelf = self._shelves.setdefault(namespace, _Shelf())
        if shelf.running is not None and not shelf.running.done():
            raise StoreError("it is being read since an earlier request")
        shelf.running = self._threads.submit(self._look_up, namespace, shelf, prompt)
        try:
            spans = shelf.running.result(self._wait_s)
        except NotYetError:
            raise StoreError(f"it did not answer within {self._wait_s} s") from None
        if shelf.index is None:
            del self._shelves[namespace]  # whatever namespaces are asked for, this does not grow
        self._touches.note(span.chunk_id for span in spans)
        return spans

    def forget(self, namespace: str, ids: Iterable[str]) -> None:
        """Match these chunks no more, because they are gone or their files are bad."""
        if (shelf := self._shelves.get(namespace)) is not None:
            shelf.bad = {*shelf.bad, *ids}

    # ---- in a thread of its own ------------------------------------------------------------------

    def _look_up(self, namespace: str, shelf: _Shelf, prompt: TokenArray) -> list[Span]:
        self._refresh(namespace, shelf)
        if shelf.index is None:
            return []
        if bad := shelf.bad:
            shelf.index.remove(bad)
            shelf.bad = shelf.bad - bad  # what came meanwhile stays
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
