"""The client's side of capture: keeps vLLM's batches full and waits for the files.

Several captures may run at once (documents, retrieved texts, the tenants of a server): each item that
is handed in has a ticket, and the `Tickets` of an engine give its results to the capture it belongs to.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.errors import SemKVError

POLL_SECONDS = 0.005
WRITE_TIMEOUT_SECONDS = 120.0
"""Longer than one file takes to be written at most: see `store.objects.objects.WRITE_TRIES_S`."""


class Tickets:
    """What became of the captures of one engine, for whoever waits for it; safe for threads.

    Args:
        take: what each rank has written since it was last asked, as fields of `Captured`.

    Attributes:
        ranks: of the engine; 0 until it was asked.
        ended: how many captures were `kept` (their files are written), `failed`, or `dropped`: their
            requests ended without them, or nobody waited any more.
    """

    def __init__(self, take: Callable[[], list[list[dict[str, Any]]]]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, list[dict[str, Any]]] = {}
        self.ranks = 0
        self.ended: Counter[str] = Counter()

    def draw(self) -> int:
        """A new ticket, whose results are kept from now on."""
        with self._lock:
            ticket = next(self._numbers)
            self._waiting[ticket] = []
            return ticket

    def poll(self) -> None:
        """Ask the engine for results."""
        taken = self._take()
        with self._lock:
            self.ranks = len(taken)
            for fields in itertools.chain.from_iterable(taken):
                if fields["ticket"] in self._waiting:
                    self._waiting[fields["ticket"]].append(fields)

    def results(self, ticket: int) -> list[dict[str, Any]] | None:
        """What all ranks say of a capture, or None while one of them has not."""
        with self._lock:
            results = self._waiting[ticket]
            return results if self.ranks and len(results) >= self.ranks else None

    def drop(self, ticket: int) -> None:
        """Nobody waits for this one any more."""
        with self._lock:
            results = self._waiting.pop(ticket, None)
            if results is None:
                return
            if not self.ranks or len(results) < self.ranks:
                self.ended["dropped"] += 1
            else:
                self.ended["failed" if any(one["error"] for one in results) else "kept"] += 1


@dataclass
class _Pending:
    """A chunk that is being computed or written."""

    item: CaptureItem
    ticket: int
    request: Future[Any]
    prefilled_at: float | None = None


class Capturing:
    """Iterates over the results of a capture.

    Args:
        prefill: starts a request that captures an item under a ticket.
        tickets: the engine's.
        items: the chunks.
        in_flight: chunks that are computed or being written at a time.
    """

    def __init__(
        self,
        prefill: Callable[[CaptureItem, int], Future[Any]],
        tickets: Tickets,
        items: Iterable[CaptureItem],
        in_flight: int,
    ) -> None:
        self._prefill = prefill
        self._tickets = tickets
        self._items = iter(items)
        self._in_flight = in_flight
        self._pending: dict[str, _Pending] = {}
        self._written_at = time.monotonic()

    def __iter__(self) -> Iterator[CaptureResult]:
        exhausted = False
        try:
            while True:
                while not exhausted and len(self._pending) < self._in_flight:
                    item = next(self._items, None)
                    if item is None:
                        exhausted = True
                    elif item.id not in self._pending:
                        self._start(item)
                if not self._pending:
                    return
                done = list(self._collect())
                yield from done
                if not done:
                    running = [p.request for p in self._pending.values() if not p.request.done()]
                    if running:
                        wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    else:
                        time.sleep(POLL_SECONDS)
        finally:
            for pending in self._pending.values():
                pending.request.cancel()
                self._tickets.drop(pending.ticket)

    def _start(self, item: CaptureItem) -> None:
        ticket = self._tickets.draw()
        self._pending[item.id] = _Pending(item, ticket, self._prefill(item, ticket))

    def _collect(self) -> Iterator[CaptureResult]:
        if any(pending.request.done() for pending in self._pending.values()):
            self._tickets.poll()
            for pending in list(self._pending.values()):
                result = self._result(pending)
                if result is not None:
                    del self._pending[pending.item.id]
                    self._tickets.drop(pending.ticket)
                    yield result

    def _result(self, pending: _Pending) -> CaptureResult | None:
        """The item's result when it is known, or None."""
        ranks = self._tickets.results(pending.ticket)
        if ranks is None:
            return self._without_answer(pending)
        self._written_at = time.monotonic()
        error = next((fields["error"] for fields in ranks if fields["error"]), None)
        size = sum(fields["bytes"] for fields in ranks)
        return CaptureResult(pending.item, 0 if error else size, error)

    def _without_answer(self, pending: _Pending) -> CaptureResult | None:
        if not pending.request.done():
            return None
        fault = pending.request.exception()
        if isinstance(fault, SemKVError):
            return CaptureResult(pending.item, 0, str(fault))
        if fault is not None:
            raise fault
        now = time.monotonic()
        pending.prefilled_at = pending.prefilled_at or now
        # While others are written, it waits behind them.
        if now - max(pending.prefilled_at, self._written_at) > WRITE_TIMEOUT_SECONDS:
            return CaptureResult(pending.item, 0, "the engine did not say that it was written")
        return None
