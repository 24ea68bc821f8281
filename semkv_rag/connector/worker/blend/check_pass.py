"""The check: how far fresh KV is from stored KV at an early layer (CacheBlend, section 4.3).

All rows but the exact ones are run through the layers up to the check layer, where K and V are all that
is computed of them. The fresh KV of these layers stays in the cache: what is picked afterwards sees it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import Selector
from semkv_rag.connector.worker.model.slice import Watcher


class CheckPass(Watcher):
    """Keeps the K and V of the check layer of what is run."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._positions: list[Tensor] = []
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        if index == self._layer:
            self._positions.append(positions)
            self._keys.append(keys)
            self._values.append(values)

    def deviation(
        self, selector: Selector, candidates: Tensor, stored: tuple[Tensor, Tensor]
    ) -> Tensor:
        """How far each candidate is off, over this rank's heads, [candidates], float32.

        Args:
            candidates: their positions, [candidates], int64, ascending.
            stored: K and V of the check layer of the candidates.
        """
        fresh = torch.searchsorted(torch.cat(self._positions), candidates)
        keys, values = torch.cat(self._keys)[fresh], torch.cat(self._values)[fresh]
        return selector.deviation(keys, values, *stored)
