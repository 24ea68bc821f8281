"""Telling the store what was used, for its eviction, while no request waits for that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from semkv_rag.errors import SemKVError

TOUCH_SECONDS = 10.0


class Touches:
    """Collects ids and hands them on every few seconds. Not thread safe.

    Args:
        touch: called with the ids that were used, in a thread of its own.
    """

    def __init__(self, touch: Callable[[set[str]], None]) -> None:
        self._touch = touch
        self._used: set[str] = set()
        self._handed_on_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="semkv-touch")

    def note(self, ids: Iterable[str]) -> None:
        """These were used now."""
        self._used.update(ids)
        if time.monotonic() - self._handed_on_at > TOUCH_SECONDS:
            self._touch_used()

    def close(self) -> None:
        """Hand on what was noted, and stop."""
        self._thread.shutdown(wait=True)
        if self._used:
            # Here: when the interpreter ends no thread is started any more.
            with suppress(SemKVError):
                self._touch(self._used)

    def _touch_used(self) -> None:
        self._handed_on_at = time.monotonic()
        used, self._used = self._used, set()
        if used:
            self._thread.submit(self._touch, used)
