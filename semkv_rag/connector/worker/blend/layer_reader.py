"""The stored layers of a blend's spans, in the order in which they are written.

On a CPU the thread that loads reads each layer itself when its turn comes. A device takes layers faster
than one core reads and checks them. So other threads read some ahead there, into memory that the device
copies from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import TypeAlias

import torch

from semkv_rag.connector.threads import pool_beside_model
from semkv_rag.reuse import Span
from semkv_rag.store.codecs import EncodedLayer

READERS = 4
AHEAD = 2 * READERS
"""Layers of spans that are read ahead at most."""

Read: TypeAlias = Callable[[int, Span], EncodedLayer]
"""Reads a layer of a span's chunk; for any thread."""


class LoadingThreads:
    """The threads that load stored KV; one set per worker.

    Attributes:
        loader: one thread, which brings stored KV into the cache.
        readers: they read and check it; None on a CPU, where the model has the cores.
    """

    def __init__(self, device: torch.device) -> None:
        self.loader: ThreadPoolExecutor = pool_beside_model(1, "semkv-load")
        self.readers: ThreadPoolExecutor | None = (
            pool_beside_model(READERS, "semkv-read") if device.type != "cpu" else None
        )

    def close(self) -> None:
        """End them; what they have not begun is left."""
        for pool in (self.loader, self.readers):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)


class LayerReader(AbstractContextManager["LayerReader"]):
    """Hands out the stored layers of one blend in order, in the thread that loads.

    At the end of its `with` block nobody reads any more.

    Args:
        order: which layers of which spans.
        readers: those who read ahead, or None.
    """

    def __init__(
        self, read: Read, order: Iterator[tuple[int, Span]], readers: ThreadPoolExecutor | None
    ) -> None:
        self._read, self._order, self._readers = read, order, readers
        self._ahead: deque[Future[EncodedLayer]] = deque()

    def take(self) -> EncodedLayer:
        """The next one in order.

        Raises:
            ChunkFileError: it cannot be read or is not what was written.
        """
        if self._readers is None:
            return self._read(*next(self._order))
        while len(self._ahead) < AHEAD and (wanted := next(self._order, None)) is not None:
            self._ahead.append(self._readers.submit(self._read, *wanted))
        return self._ahead.popleft().result()

    def __exit__(self, *_: object) -> None:
        wait([reading for reading in self._ahead if not reading.cancel()])
