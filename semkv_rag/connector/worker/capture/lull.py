"""Lulls: moments in which vLLM neither begins nor ends a step, so that what can wait is in nobody's way.

A captured prompt's file is not needed before somebody asks the like of it again. Steps begin and end in
other threads and processes, vLLM's engine and its front end, which on a machine with few cores share the
ones that the model leaves: written then, or during an answer's short steps, a file would delay each of
them. Between requests, and while a long prefill keeps the model's own cores busy, the others are idle.
"""

from __future__ import annotations

import threading
import time

LULL_S = 0.03
"""Longer than from one step of a request to its next."""
LONGEST_WAIT_S = 2.0
"""Under load there may be no lull."""
MOST_BYTES = 256 << 20
"""Held by what waits; beyond it nothing waits."""


class Lull:
    """One per worker. Steps are told by the worker's own thread; safe for threads that wait."""

    def __init__(self) -> None:
        self._last_change = time.monotonic() - LULL_S
        self._lock = threading.Lock()
        self._held_bytes = 0

    def step(self) -> None:
        """Called when a step begins, and when it ends."""
        self._last_change = time.monotonic()

    def hold(self, size_bytes: int) -> float:
        """Before something that holds memory waits: until when it may, for `wait`."""
        with self._lock:
            self._held_bytes += size_bytes
            full = self._held_bytes > MOST_BYTES
        return time.monotonic() + (0 if full else LONGEST_WAIT_S)

    def wait(self, until: float, size_bytes: int) -> None:
        """Return in a lull, or when it is `until`; what waited is not held any more."""
        while (now := time.monotonic()) < min(until, lull := self._last_change + LULL_S):
            time.sleep(min(until, lull) - now)
        with self._lock:
            self._held_bytes -= size_bytes
