"""How far the stored V of computed tokens were off, seen while they are computed.

Whole blocks have to be copied to read some tokens of them, so only some layers are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from semkv_rag.blend import LOOKED_AT, sensitivity_of
from semkv_rag.connector.worker.model.block_layout import BlockLayout
from semkv_rag.connector.worker.model.paged import PagedKV


class SeenChange:
    """Compares the V of some tokens, layer by layer, with those that the paged cache holds before.

    Args:
        layouts: of each layer's blocks.
        blocks: the request's blocks, [blocks], int64.
        positions: of the tokens, [sample], int64, ascending.
        attention: what the question gives them, [layers, sample].
        sensitivity: [layers, sample].

    Attributes:
        changed: their V's distance from the stored, times attention, over the layers that are looked at.
        expected: the same of their sensitivity.
    """

    def __init__(
        self,
        paged: PagedKV,
        layouts: Sequence[BlockLayout],
        blocks: Tensor,
        positions: Tensor,
        attention: Tensor,
        sensitivity: Tensor,
    ) -> None:
        self._paged, self._layouts = paged, layouts
        self._positions, self._attention = positions, attention
        size = paged.block_size
        held, place = torch.unique(positions // size, return_inverse=True)
        self._blocks = blocks[held]
        self._rows = (place * size + positions % size).cpu()
        self._stored = torch.empty(0)
        self.changed = torch.zeros((), device=positions.device)
        self.expected = (attention * sensitivity)[LOOKED_AT].sum()
        self._looked_at = frozenset(range(len(layouts))[LOOKED_AT])

    def before(self, index: int) -> None:
        """Read what layer `index` has stored, before the layer writes over it."""
        if index not in self._looked_at:
            return
        layout = self._layouts[index]
        cache = layout.attention.kv_cache
        codes = self._paged.codes(cache, self._paged.copy_blocks([cache], self._blocks))
        self._stored = layout.unpack_values(codes)[self._rows].to(self._positions.device)

    def see(self, positions: Tensor, index: int, keys: Tensor, values: Tensor) -> None:
        """Take in the fresh V of a layer.

        Args:
            positions: of the tokens that are computed, [tokens], int64, ascending.
            values: [tokens, kv_heads, head_dim].
        """
        if index not in self._looked_at:
            return
        here = torch.nonzero(torch.isin(self._positions, positions)).flatten()
        rows = torch.searchsorted(positions, self._positions[here])
        off = sensitivity_of(values[rows], self._stored[here])
        self.changed = self.changed + (self._attention[index, here] * off).sum()
