"""Lulls: moments in which vLLM neither begins nor ends a step. Work that can wait is done in them.

Nobody needs a captured prompt's file before the prompt is asked again. Steps begin and end in vLLM's
engine process and its front end. On a machine with few cores these share the cores that the model leaves,
and a file that is written there delays each of an answer's short steps. Those cores are idle between
requests, and during a long prefill, which keeps only the model's own cores busy.
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
    """Knows when there is a lull; one per worker.

    The worker's own thread reports steps; any thread may wait for a lull.
    """

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
