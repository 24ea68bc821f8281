"""A pause for a database that does not answer, so that not every request waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

REST_S = 10.0
"""How long a database that did not answer is left alone."""


class Rest:
    """Whether a database is worth asking. Threads may share it.

    Args:
        wait_s: what an answer may take. A failure after half of it was one of waiting, and whoever
            asks in the next `REST_S` is refused at once. Then one caller may try while others still
            are refused.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._until = 0.0

    def check(self) -> None:
        """Refuse while the database rests.

        Raises:
            TimeoutError: it does.
        """
        left = self._until - time.monotonic()
        if left > 0:
            raise TimeoutError(
                f"the database did not answer in time; it is asked again in {left:.0f} s"
            )

    @contextmanager
    def asking(self, *failures: type[BaseException]) -> Iterator[None]:
        """Ask the database: note whether that is answered or ends in one of `failures`.

        Raises:
            TimeoutError: the database rests.
        """
        self.check()
        began = time.monotonic()
        if self._until:
            self._until = began + REST_S
        until = 0.0
        try:
            yield
        except failures:
            if time.monotonic() - began > self._wait_s / 2:
                until = time.monotonic() + REST_S
            raise
        finally:
            self._until = until
