"""Stored KV on its way to the cache, layer by layer, one layer ahead of the computation.

A thread reads and verifies the next layer's files while the model computes this one. It does no more
than that: every further call it made would take Python's lock from the thread that runs the model, and
cost more there than it saves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from semkv_rag.connector.worker.model.model_view import Layer
from semkv_rag.reuse import Span

SpanKV: TypeAlias = tuple[Tensor, Tensor]
"""One span's K and V in one layer, each [tokens, kv_heads, head_dim]."""


class KVSource(Protocol):
    """Where a chunk's KV comes from: a chunk file, or memory in the gate."""

    def layer(self, index: int) -> SpanKV:
        """K and V of one layer, each [tokens, kv_heads, head_dim].

        Raises:
            ChunkFileError: they cannot be read or are not what was written.
        """

    def sensitivity(self) -> Tensor | None:
        """How much each token depends on what stands before it, [layers, tokens], uint8, or None.

        Raises:
            ChunkFileError: as above.
        """


class SpanLoader:
    """Brings the KV of one request's spans; `layer` is asked for in ascending order.

    Args:
        first: the first layer that will be asked for; its reading begins at once.

    Attributes:
        first: as given.
        waited_ms: the time `layer` had to wait.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        sources: Mapping[str, KVSource],
        layers: Sequence[Layer],
        device: torch.device,
        thread: ThreadPoolExecutor,
        first: int,
    ) -> None:
        self.first = first
        self.waited_ms = 0.0
        self._spans, self._sources, self._layers = spans, sources, layers
        self._device, self._thread = device, thread
        # In the keys' dtype; by rotary module, since layers share them, and shift.
        self._matrices: dict[tuple[int, int], Tensor] = {}
        self._ahead_index = first
        self._ahead = self._begin(first)

    def layer(self, index: int) -> list[SpanKV]:
        """Each span's K and V of layer `index`, at their new positions.

        Raises:
            ChunkFileError: a chunk's KV cannot be had.
        """
        began = time.perf_counter()
        if index != self._ahead_index:  # layers that need no stored KV were passed over
            self.close()
            self._ahead = self._begin(index)
        stored = self._ahead.result()
        self.waited_ms += (time.perf_counter() - began) * 1000
        if index + 1 < len(self._layers):
            self._ahead_index = index + 1
            self._ahead = self._begin(index + 1)
        return [
            (self._moved(index, keys, span.shift), values)
            for span, (keys, values) in zip(self._spans, stored, strict=True)
        ]

    def close(self) -> None:
        """Wait for a layer that is under way: its files can be closed then."""
        if not self._ahead.cancel():
            self._ahead.exception()

    def _begin(self, index: int) -> Future[list[SpanKV]]:
        return self._thread.submit(self._read, index)

    @torch.inference_mode()
    def _read(self, index: int) -> list[SpanKV]:
        """Each span's part of its chunk's K and V, as stored."""
        parts = []
        for span in self._spans:
            rows = slice(span.src, span.src + span.length)
            keys, values = self._sources[span.chunk_id].layer(index)
            parts.append((keys[rows].to(self._device), values[rows].to(self._device)))
        return parts

    def _moved(self, index: int, keys: Tensor, shift: int) -> Tensor:
        rotary = self._layers[index].rotary
        if rotary is None or shift == 0:
            return keys
        matrix = self._matrices.get((id(rotary), shift))
        if matrix is None:
            matrix = rotary.matrix(shift, keys.shape[-1]).to(keys.dtype)
            self._matrices[id(rotary), shift] = matrix
        return keys @ matrix
