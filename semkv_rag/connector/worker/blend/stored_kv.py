"""Stored KV, written into the paged cache layer by layer, just before the model reaches each layer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.blend.span_loader import SpanKV, SpanLoader
from semkv_rag.connector.worker.model.eager import EagerModel
from semkv_rag.reuse import Span


class StoredKV:
    """Of one blend, or of a part of it.

    What is computed is written over it soon after: to write all of a span is cheaper than to leave the
    computed rows out.

    Args:
        spans: those whose KV is written.
        loader: of their KV, from the first layer that is needed.
        check_layer: up to it, inclusive, all rows but the exact ones are computed, and only exact spans
            are written; None where none is checked.

    Attributes:
        compared: K and V of the inexact spans at the check layer, once it was reached.
    """

    def __init__(
        self,
        model: EagerModel,
        rows: BlendRows,
        spans: Sequence[Span],
        loader: SpanLoader,
        check_layer: int | None = None,
    ) -> None:
        self._model, self._rows, self._spans, self._loader = model, rows, spans, loader
        self._check_layer = -1 if check_layer is None else check_layer
        self._first, self._reached = loader.first, -1
        self.compared: list[SpanKV] = []

    def arriving(self) -> AbstractContextManager[None]:
        """Have each layer find its stored KV in the cache; what was written before stays."""
        return self._model.reaching(self._bring)

    def finish(self) -> None:
        """Write the layers that no forward has reached."""
        for index in range(self._reached + 1, len(self._model.layers)):
            self._write(index)

    def close(self) -> float:
        """End the reading; the time that it took, in ms."""
        self._loader.close()
        return self._loader.waited_ms

    def _bring(self, index: int) -> None:
        if index > self._reached:  # the first piece to come here
            self._write(index)

    def _write(self, index: int) -> None:
        self._reached = index
        if index < self._first:
            return
        stored = self._loader.layer(index)
        for span, (keys, values) in zip(self._spans, stored, strict=True):
            if span.exact or index > self._check_layer:
                slots = self._rows.slots[self._rows.of_span(span)]
                self._model.tap.write(index, keys, values, slots)
        if index == self._check_layer:
            pairs = zip(self._spans, stored, strict=True)
            self.compared = [kv for span, kv in pairs if not span.exact]
