"""What became of the captures of one engine, for whoever waits for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

ASKED_S = 1.0
"""How often the engine is asked, while no worker has told anything by itself."""
MISSED_S = 5.0
"""And how often once one has: for what could not be told, and to notice that the engine stopped."""


class Tickets:
    """Each capture has a number, under which every rank says what became of it; safe for threads.

    Args:
        take: asks the engine for what each rank has to say, as fields of `Captured`.
        ranks: of the engine.

    Attributes:
        ended: how many captures were `kept` (their files are written), `failed`, or `dropped`: their
            requests ended without them, or nobody waited any more.
        heard_at: when the last result came, by `time.monotonic`.
    """

    def __init__(
        self, take: Callable[[], Iterable[Iterable[Mapping[str, Any]]]], ranks: int
    ) -> None:
        self._take, self._ranks = take, ranks
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._waiting: dict[int, list[Mapping[str, Any]]] = {}
        self._workers_report = False
        self._asked_at = time.monotonic()
        self._news = 0
        self.ended: Counter[str] = Counter()
        self.heard_at = time.monotonic()

    def draw(self) -> int:
        """A new ticket, whose results are kept from now on."""
        with self._changed:
            ticket = next(self._numbers)
            self._waiting[ticket] = []
            return ticket

    def tell(self, fields: Mapping[str, Any]) -> None:
        """Take what a worker says by itself."""
        with self._changed:
            self._workers_report = True
            self._add([fields])

    def ask(self) -> None:
        """Ask the engine for what was not told, if it was not asked of late."""
        now = time.monotonic()
        with self._changed:
            if now < self._asked_at + (MISSED_S if self._workers_report else ASKED_S):
                return
            self._asked_at = now
        taken = self._take()
        with self._changed:
            self._add(itertools.chain.from_iterable(taken))

    def _add(self, results: Iterable[Mapping[str, Any]]) -> None:
        for fields in results:
            if fields["ticket"] in self._waiting:
                self._waiting[fields["ticket"]].append(fields)
                self.heard_at = time.monotonic()
                self._wake()

    def results(self, ticket: int) -> list[Mapping[str, Any]] | None:
        """What all ranks say of a capture, or None while one of them has not."""
        with self._changed:
            results = self._waiting[ticket]
            return results if len(results) >= self._ranks else None

    def drop(self, ticket: int) -> None:
        """Nobody waits for this one any more."""
        with self._changed:
            results = self._waiting.pop(ticket, None)
            if results is None:
                return
            if len(results) < self._ranks:
                self.ended["dropped"] += 1
            else:
                self.ended["failed" if any(one["error"] for one in results) else "kept"] += 1

    # ---- waiting ---------------------------------------------------------------------------

    @property
    def news(self) -> int:
        """A number that grows with each result."""
        with self._changed:
            return self._news

    def wake(self) -> None:
        """Let whoever waits look again."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        self._news += 1
        self._changed.notify_all()

    def wait(self, seen: int) -> None:
        """Return when there is news, or it is time to ask.

        Args:
            seen: the number of the news that the caller knows.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._news != seen, ASKED_S)
