"""The check: how far fresh KV is from stored KV at an early layer (CacheBlend, section 4.3).

All rows but the exact ones are run through the layers up to the check layer, where K and V are all that
is computed of them. The fresh KV of these layers stays in the cache: what is picked afterwards sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import Selector
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.model.eager import EagerModel


class CheckPass:
    """Runs rows and keeps their K and V of the check layer.

    Attributes:
        computed_rows: tokens times layers; the check layer counts in full.
    """

    def __init__(self, model: EagerModel, rows: BlendRows, layer: int) -> None:
        self._model, self._rows, self._layer = model, rows, layer
        self._launched: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.computed_rows = 0

    def compute(self, piece: Tensor) -> None:
        """Run some rows, [rows], int64, ascending over all pieces."""
        rows = self._rows
        self._launched.append(piece)
        self._model.fill(
            rows.tokens_of(piece), rows.blocks, rows.positions[piece], self._keep, self._layer
        )
        self.computed_rows += len(piece) * (self._layer + 1)

    def deviation(self, selector: Selector, stored: tuple[Tensor, Tensor]) -> Tensor:
        """Of each candidate, over this rank's heads, [candidates], float32.

        Args:
            stored: K and V of the check layer of the candidates.
        """
        fresh = torch.searchsorted(torch.cat(self._launched), self._rows.candidates)
        keys, values = torch.cat(self._keys)[fresh], torch.cat(self._values)[fresh]
        return selector.deviation(keys, values, *stored)

    def _keep(self, index: int, keys: Tensor, values: Tensor) -> None:
        if index == self._layer:
            self._keys.append(keys)
            self._values.append(values)
