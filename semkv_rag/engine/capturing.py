"""The client's side of capture: keeps vLLM's batches full and waits for the files.

Several captures may run at once (documents, retrieved texts, the tenants of a server): each item that
is handed in has a ticket, and the `Tickets` of an engine give its results to the capture it belongs to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.engine.tickets import Tickets
from semkv_rag.errors import EngineError, SemKVError

WRITE_TIMEOUT_SECONDS = 120.0
"""Longer than one file takes to be written at most: see `store.objects.objects.WRITE_TRIES_S`."""


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
                seen = self._tickets.news
                done = list(self._collect())
                yield from done
                if not done:
                    self._tickets.wait(seen)
        finally:
            for pending in self._pending.values():
                pending.request.cancel()
                self._tickets.drop(pending.ticket)

    def _start(self, item: CaptureItem) -> None:
        ticket = self._tickets.draw()
        request = self._prefill(item, ticket)
        self._pending[item.id] = _Pending(item, ticket, request)
        request.add_done_callback(lambda _: self._tickets.wake())

    def _collect(self) -> Iterator[CaptureResult]:
        if any(pending.request.done() for pending in self._pending.values()):
            self._tickets.ask()
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
        error = next((fields["error"] for fields in ranks if fields["error"]), None)
        size = sum(fields["bytes"] for fields in ranks)
        return CaptureResult(pending.item, 0 if error else size, error)

    def _without_answer(self, pending: _Pending) -> CaptureResult | None:
        if not pending.request.done():
            return None
        fault = pending.request.exception()
        if isinstance(fault, SemKVError) and not isinstance(fault, EngineError):
            return CaptureResult(pending.item, 0, str(fault))
        if fault is not None:
            raise fault
        now = time.monotonic()
        pending.prefilled_at = pending.prefilled_at or now
        # While others are written, it waits behind them.
        if now - max(pending.prefilled_at, self._tickets.heard_at) > WRITE_TIMEOUT_SECONDS:
            return CaptureResult(pending.item, 0, "the engine did not say that it was written")
        return None
