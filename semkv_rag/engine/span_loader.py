"""Stored KV on its way to the cache, layer by layer, one layer ahead of the computation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from semkv_rag.engine.model_view import Layer
from semkv_rag.reuse import Span


class KVSource(Protocol):
    """Where a chunk's KV comes from: a chunk file, or memory in the gate."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [tokens, kv_heads, head_dim].

        Raises:
            ChunkFileError: they cannot be read or are not what was written.
        """


class SpanLoader:
    """Reads the KV of one request's spans; `layer` is asked for in ascending order.

    Attributes:
        waited_ms: the time `layer` had to wait for reading, verifying and rotating.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        sources: Mapping[str, KVSource],
        layers: Sequence[Layer],
        device: torch.device,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.waited_ms = 0.0
        self._spans, self._sources, self._layers = spans, sources, layers
        self._device, self._pool = device, pool
        self._ahead: Future[tuple[Tensor, Tensor]] = pool.submit(self._read, 0)
        self._ahead_index = 0

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of all spans' tokens at their new positions, [tokens, kv_heads, head_dim].

        Raises:
            ChunkFileError: a chunk's KV cannot be had.
        """
        began = time.perf_counter()
        if index != self._ahead_index:  # layers that need no stored KV were passed over
            self.close()
            self._ahead = self._pool.submit(self._read, index)
        keys, values = self._ahead.result()
        self.waited_ms += (time.perf_counter() - began) * 1000
        if index + 1 < len(self._layers):
            self._ahead_index = index + 1
            self._ahead = self._pool.submit(self._read, index + 1)
        return keys, values

    def close(self) -> None:
        """Wait for a read that is under way, so that its files can be closed."""
        if not self._ahead.cancel():
            self._ahead.exception()

    @torch.inference_mode()
    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        rotary = self._layers[index].rotary
        keys, values = [], []
        for span in self._spans:
            k, v = self._sources[span.chunk_id].layer(index)
            rows = slice(span.src, span.src + span.length)
            moved = k[rows].to(self._device, non_blocking=True)
            keys.append(moved if rotary is None else rotary.rotate(moved, span.shift))
            values.append(v[rows].to(self._device, non_blocking=True))
        return torch.cat(keys), torch.cat(values)
