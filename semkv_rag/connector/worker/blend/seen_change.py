"""How far the stored V of computed tokens were off, seen while they are computed.

To read the cache back takes its time, so only some layers are looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from semkv_rag.blend import LOOKED_AT, sensitivity_of
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.model.slice import Watcher


class SeenChange(Watcher):
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
        self.changed = torch.zeros((), device=tokens.positions.device)
        self.expected = (attention * sensitivity)[LOOKED_AT].sum()
        self._looked_at = frozenset(range(len(tokens.layouts))[LOOKED_AT])

    def see(self, index: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        if index not in self._looked_at:
            return
        stored, sampled = self._tokens.values(index), self._tokens.positions
        here = torch.nonzero(torch.isin(sampled, positions)).flatten()
        rows = torch.searchsorted(positions, sampled[here])
        off = sensitivity_of(values[rows], stored[here])
        self.changed = self.changed + (self._attention[index, here] * off).sum()
