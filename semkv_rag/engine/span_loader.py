"""Stored KV on its way to the cache, layer by layer, one layer ahead of the computation.

A thread reads and verifies the next layer's files and moves its keys to their new positions while the
model computes this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from semkv_rag.engine.model_view import Layer
from semkv_rag.reuse import Span

SERIAL_ELEMENTS = 32_000
"""On a CPU, torch spreads operations from 32,768 elements on over threads, which would get in the way of
the model's own. Pieces below that also stay in the processor's cache from one operation to the next."""


class KVSource(Protocol):
    """Where a chunk's KV comes from: a chunk file, or memory in the gate."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [tokens, kv_heads, head_dim].

        Raises:
            ChunkFileError: they cannot be read or are not what was written.
        """


class SpanLoader:
    """Reads the KV of one request's spans; `layer` is asked for in ascending order.

    Args:
        first: the first layer that will be asked for; its reading begins at once.

    Attributes:
        waited_ms: the time `layer` had to wait.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        sources: Mapping[str, KVSource],
        layers: Sequence[Layer],
        device: torch.device,
        pool: ThreadPoolExecutor,
        first: int,
    ) -> None:
        self.waited_ms = 0.0
        self._spans, self._sources, self._layers = spans, sources, layers
        self._device, self._pool = device, pool
        shifts = torch.tensor([span.shift for span in spans])
        lengths = torch.tensor([span.length for span in spans])
        self._shifts = shifts.repeat_interleave(lengths).to(device)
        # Layers that share a rotary module share its angles too.
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        # Used in turn: one is read into while the other's KV is written to the cache.
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None, None]
        self._ahead: Future[tuple[Tensor, Tensor]] = pool.submit(self._read, first)
        self._ahead_index = first
        self._latest: tuple[Tensor, Tensor] | None = None
        self._latest_index = -1

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of all spans' tokens at their new positions, [tokens, kv_heads, head_dim].

        They stay as they are until the next layer is asked for.

        Raises:
            ChunkFileError: a chunk's KV cannot be had.
        """
        if index == self._latest_index and self._latest is not None:
            return self._latest
        began = time.perf_counter()
        if index != self._ahead_index:  # layers that need no stored KV were passed over
            self.close()
            self._ahead = self._pool.submit(self._read, index)
        self._latest, self._latest_index = self._ahead.result(), index
        self.waited_ms += (time.perf_counter() - began) * 1000
        if index + 1 < len(self._layers):
            self._ahead_index = index + 1
            self._ahead = self._pool.submit(self._read, index + 1)
        return self._latest

    def close(self) -> None:
        """Wait for a read that is under way, so that its files can be closed."""
        if not self._ahead.cancel():
            self._ahead.exception()

    @torch.inference_mode()
    def _read(self, index: int) -> tuple[Tensor, Tensor]:
        begin = 0
        for span in self._spans:
            k, v = self._sources[span.chunk_id].layer(index)
            keys, values = self._buffer(index, k, v)
            for rows in self._pieces(span.length, k[0].numel()):
                source = slice(span.src + rows.start, span.src + rows.stop)
                target = slice(begin + rows.start, begin + rows.stop)
                values[target].copy_(v[source])
                self._move(index, k[source].to(self._device), keys[target], target)
            begin += span.length
        return keys, values

    def _move(self, index: int, stored: Tensor, out: Tensor, rows: slice) -> None:
        """Put stored keys of the tokens `rows` into `out`, at their new positions."""
        rotary = self._layers[index].rotary
        if rotary is None or not bool(self._shifts[rows].any()):
            out.copy_(stored)
            return
        if id(rotary) not in self._angles:
            self._angles[id(rotary)] = rotary.angles(self._shifts)
        cos, sin = self._angles[id(rotary)]
        rotary.turn(stored, cos[rows], sin[rows], out)

    def _pieces(self, tokens: int, token_elements: int) -> Iterator[slice]:
        """The rows of a span that are taken at once."""
        size = max(1, SERIAL_ELEMENTS // token_elements) if self._device.type == "cpu" else tokens
        for begin in range(0, tokens, size):
            yield slice(begin, min(begin + size, tokens))

    def _buffer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Room for all spans' K and V of a layer, like those of one chunk."""
        tokens, buffer = len(self._shifts), self._buffers[index % 2]
        if buffer is None or buffer[0].shape[1:] != keys.shape[1:]:
            buffer = (
                torch.empty((tokens, *keys.shape[1:]), dtype=keys.dtype, device=self._device),
                torch.empty((tokens, *values.shape[1:]), dtype=values.dtype, device=self._device),
            )
            self._buffers[index % 2] = buffer
        return buffer
