"""Turns: what one namespace may have in the engine at a time, so that the others are answered in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from semkv_rag.errors import OptionError


class Turns:
    """Lets in one after another what a namespace asks of the engine beyond what it may at a time.

    For one event loop.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[str, _Queue] = {}

    @asynccontextmanager
    async def taken(self, namespace: str, count: int) -> AsyncIterator[None]:
        """Wait for places in the engine and hold them while it is entered; first come, first served.

        Args:
            count: of places.

        Raises:
            OptionError: there are never so many.
        """
        if count > self._most:
            raise OptionError(
                f"the request wants {count} answers at a time: use n up to {self._most}"
            )
        queue = self._queues.setdefault(namespace, _Queue(asyncio.Semaphore(self._most)))
        queue.users += 1
        held = 0
        try:
            async with queue.next:  # one collects its places at a time: two could hold half each
                while held < count:
                    await queue.places.acquire()
                    held += 1
            yield
        finally:
            for _ in range(held):
                queue.places.release()
            queue.users -= 1
            if not queue.users:
                del self._queues[namespace]


@dataclass
class _Queue:
    places: asyncio.Semaphore
    next: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
