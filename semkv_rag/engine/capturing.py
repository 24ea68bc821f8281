"""The client's side of capture: keeps vLLM's batches full and waits for the files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from semkv_rag.corpus.capture import CaptureItem, CaptureResult
from semkv_rag.errors import SemKVError

POLL_SECONDS = 0.005
WRITE_TIMEOUT_SECONDS = 120.0


@dataclass
class _Pending:
    """A chunk that is being computed or written."""

    item: CaptureItem
    request: Future[Any]
    retried: bool = False
    prefilled_at: float | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)


class Capturing:
    """Iterates over the results of a capture.

    Args:
        prefill: starts a request that captures an item; told whether to pass the prefix cache by.
        take: what each rank has written since it was last asked, as fields of `Captured`.
        items: the chunks.
        in_flight: chunks that are computed or being written at a time.
    """

    def __init__(
        self,
        prefill: Callable[[CaptureItem, bool], Future[Any]],
        take: Callable[[], list[list[dict[str, Any]]]],
        items: Iterable[CaptureItem],
        in_flight: int,
    ) -> None:
        self._prefill = prefill
        self._take = take
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
                        self._pending[item.id] = _Pending(item, self._prefill(item, False))
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

    def _collect(self) -> Iterator[CaptureResult]:
        if any(pending.request.done() for pending in self._pending.values()):
            ranks = self._take()
            for rank in ranks:
                for fields in rank:
                    if fields["chunk_id"] in self._pending:
                        self._pending[fields["chunk_id"]].ranks.append(fields)
            for chunk_id, pending in list(self._pending.items()):
                result = self._result(pending, len(ranks))
                if result is not None:
                    del self._pending[chunk_id]
                    yield result

    def _result(self, pending: _Pending, ranks: int) -> CaptureResult | None:
        """The item's result when it is known, or None; an incomplete capture is started again."""
        if len(pending.ranks) < ranks:
            return self._without_answer(pending)
        if any(fields["incomplete"] for fields in pending.ranks) and not pending.retried:
            self._pending[pending.item.id] = _Pending(
                pending.item, self._prefill(pending.item, True), retried=True
            )
            return None
        error = next((fields["error"] for fields in pending.ranks if fields["error"]), None)
        size = sum(fields["bytes"] for fields in pending.ranks)
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
        if now - pending.prefilled_at > WRITE_TIMEOUT_SECONDS:
            return CaptureResult(pending.item, 0, "the engine did not say that it was written")
        return None
