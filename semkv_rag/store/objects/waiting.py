"""How long files are waited for that are to come from an object store.

Requests wait for their KV, so the waiting is bounded: what the object store sends must come at
`LEAST_BYTES_PER_S` or faster, and be `timeout_s` late at most. Slower than that, computing is as fast.
After a request waited in vain the others do not wait at all for a while; then one of them tries again.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from semkv_rag.errors import ObjectStoreError
from semkv_rag.store.index.rest import REST_S

LEAST_BYTES_PER_S: Final = 50_000_000


class Answers:
    """What the object store has sent to this process, and whether it is worth asking; for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self.received_bytes = 0

    def received(self, count: int) -> None:
        """So many bytes came."""
        with self._lock:
            self.received_bytes += count
            self._until = 0.0

    def silent(self) -> None:
        """Somebody waited in vain."""
        with self._lock:
            self._until = time.monotonic() + REST_S

    def check(self) -> None:
        """Refuse while the object store is left alone; then let one through.

        Raises:
            ObjectStoreError: it is.
        """
        with self._lock:
            left = self._until - time.monotonic()
            if left > 0:
                raise ObjectStoreError(
                    f"the object store did not answer in time; it is asked again in {left:.0f} s"
                )
            if self._until:
                self._until = time.monotonic() + REST_S


class Wait:
    """What one request, or another task, waits for.

    Args:
        timeout_s: how late it may be.

    Attributes:
        order: smaller ones are served first.
    """

    def __init__(self, answers: Answers, timeout_s: float, order: int) -> None:
        self._answers, self._timeout_s = answers, timeout_s
        self._lock = threading.Lock()
        self._began: float | None = None
        self._before = 0
        self.order = order

    def begin(self) -> None:
        """The object store is asked now, or was before: from the first time on the time counts.

        Raises:
            ObjectStoreError: it is left alone for now.
        """
        with self._lock:
            if self._began is None:
                self._answers.check()
                self._before = self._answers.received_bytes
                self._began = time.monotonic()

    def left_s(self) -> float:
        """How long what comes next may take."""
        assert self._began is not None
        came = self._answers.received_bytes - self._before
        return self._began + self._timeout_s + came / LEAST_BYTES_PER_S - time.monotonic()

    def in_vain(self) -> ObjectStoreError:
        """The error of what did not come in time."""
        self._answers.silent()
        return ObjectStoreError(
            f"the object store did not answer within {self._timeout_s * 1000:.0f} ms"
        )
