"""After a request waited in vain for an object store, other requests do not wait for it for a while. Then
one of them tries again.
"""

from __future__ import annotations

import threading
import time

from semkv_rag.errors import ObjectStoreError
from semkv_rag.store.index.rest import REST_S


class Answers:
    """Whether the object store is worth asking; one per process, safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0

    def received(self) -> None:
        """Something came."""
        with self._lock:
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
