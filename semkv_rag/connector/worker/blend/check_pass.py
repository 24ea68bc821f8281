"""The check: how far fresh KV is from stored KV at an early layer (CacheBlend, section 4.3).

All rows but the exact ones are run through the layers up to the check layer, where K and V are all that
is computed of them. The fresh KV of these layers stays in the cache: what is picked afterwards sees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv_rag.blend import Selector
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.blend.span_loader import SpanKV
from semkv_rag.connector.worker.model.eager import EagerModel


class CheckPass:
    """Runs the rows and keeps their K and V of the check layer.

    Args:
        pieces: rows, [rows], int64, ascending over all pieces; each is one launch.

    Attributes:
        computed_rows: tokens times layers; the check layer counts in full.
    """

    def __init__(
        self, model: EagerModel, rows: BlendRows, pieces: Sequence[Tensor], layer: int
    ) -> None:
        self._model, self._rows, self._pieces, self._layer = model, rows, pieces, layer
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.computed_rows = 0

    def run(self) -> None:
        rows = self._rows
        for piece in self._pieces:
            self._model.fill(
                rows.tokens_of(piece), rows.blocks, rows.positions[piece], self._keep, self._layer
            )
            self.computed_rows += len(piece) * (self._layer + 1)

    def deviation(self, selector: Selector, stored: Sequence[SpanKV]) -> Tensor:
        """Of each candidate, over this rank's heads, [candidates], float32.

        Args:
            stored: K and V of the check layer of the spans that are not exact.
        """
        fresh = torch.searchsorted(torch.cat(list(self._pieces)), self._rows.candidates)
        return selector.deviation(
            torch.cat(self._keys)[fresh],
            torch.cat(self._values)[fresh],
            torch.cat([keys for keys, _ in stored]),
            torch.cat([values for _, values in stored]),
        )

    def _keep(self, index: int, keys: Tensor, values: Tensor) -> None:
        if index == self._layer:
            self._keys.append(keys)
            self._values.append(values)
