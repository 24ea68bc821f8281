"""How far the stored V of computed tokens were off, seen while they are computed.

Reading the cache back takes time, so only some layers are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import LOOKED_AT, sensitivity_of
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.model.slice import Watcher
from semkv_rag.connector.worker.ranks import Ranks


class SeenChange(Watcher):
    """Compares the V of some tokens, layer by layer, with those that the paged cache holds before.

    Args:
        tokens: those that are compared, [sample].
        ranks: this one among those that compute the model.

    Attributes:
        squares: how far their V are from the stored, squared, over this rank's heads and in its layers,
            [layers of this rank, sample]; 0 in layers that are not looked at.
    """

    def __init__(self, tokens: ReadBack, ranks: Ranks) -> None:
        self._tokens, self._first_layer = tokens, ranks.first_layer
        layers, device = len(tokens.layouts), tokens.positions.device
        self.squares = torch.zeros(layers, len(tokens.positions), device=device)
        self._looked_at = frozenset(range(ranks.layers)[LOOKED_AT])

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        if self._first_layer + index not in self._looked_at:
            return
        stored, sampled = self._tokens.values(index), self._tokens.positions
        here = torch.nonzero(torch.isin(sampled, positions)).flatten()
        rows = torch.searchsorted(positions, sampled[here])
        self.squares[index, here] = sensitivity_of(values[rows], stored[here]).square()
