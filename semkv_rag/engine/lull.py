"""Lulls: when no step of the model has run for a moment, so that what can wait takes no core from one.

A captured prompt's file is not needed before somebody asks the like of it again. Written while its own
request is answered, it would slow each of the answer's steps on a machine with few cores.
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
        self._in_step = False
        self._last_step = time.monotonic() - LULL_S
        self._lock = threading.Lock()
        self._held_bytes = 0

    def begin_step(self) -> None:
        """Called before each step."""
        self._in_step = True

    def end_step(self) -> None:
        """Called after each step."""
        self._last_step = time.monotonic()
        self._in_step = False

    def hold(self, size_bytes: int) -> float:
        """Before something that holds memory waits: until when it may, for `wait`."""
        with self._lock:
            self._held_bytes += size_bytes
            full = self._held_bytes > MOST_BYTES
        return time.monotonic() + (0 if full else LONGEST_WAIT_S)

    def wait(self, until: float, size_bytes: int) -> None:
        """Return in a lull, or when it is `until`; what waited is not held any more."""
        while (now := time.monotonic()) < until:
            if not self._in_step and now - self._last_step >= LULL_S:
                break
            time.sleep(LULL_S / 3)
        with self._lock:
            self._held_bytes -= size_bytes
