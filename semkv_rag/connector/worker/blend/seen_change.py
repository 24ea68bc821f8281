"""How far the stored V of computed tokens were off, seen while they are computed.

To read the cache back takes its time, so only some layers are looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import LOOKED_AT, sensitivity_of
from semkv_rag.connector.worker.model.read_back import ReadBack


class SeenChange:
    """Compares the V of some tokens, layer by layer, with those that the paged cache holds before.

    Args:
        tokens: those that are compared, [sample].
        attention: what the question gives them, [layers, sample].
        sensitivity: [layers, sample].

    Attributes:
        changed: their V's distance from the stored, times attention, over the layers that are looked at.
        expected: the same of their sensitivity.
    """

    def __init__(self, tokens: ReadBack, attention: Tensor, sensitivity: Tensor) -> None:
        self._tokens, self._attention = tokens, attention
        self._positions = tokens.positions
        self._stored = torch.empty(0)
        self.changed = torch.zeros((), device=tokens.positions.device)
        self.expected = (attention * sensitivity)[LOOKED_AT].sum()
        self._looked_at = frozenset(range(len(tokens.layouts))[LOOKED_AT])

    def before(self, index: int) -> None:
        """Read what layer `index` has stored, before the layer writes over it."""
        if index in self._looked_at:
            self._stored = self._tokens.values(index)

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
