"""How far a blend is expected to be from full prefill, from what is seen of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from semkv_rag.blend import LOOKED_AT, SAMPLED, expected_loss, left_share, needed, pick
from semkv_rag.connector.worker.blend.rows import BlendRows
from semkv_rag.connector.worker.blend.seen_change import SeenChange
from semkv_rag.connector.worker.model.read_back import ReadBack
from semkv_rag.connector.worker.ranks import Ranks


class Expectation:
    """What one blend is expected to lose. Its selector weighs attention by sensitivity.

    Args:
        attention: what the question gives each candidate, [layers, candidates].
        sensitivity: over all ranks' heads, [layers, candidates]; None where no chunk has it stored.
        ranks: those that compute the model.
    """

    def __init__(self, attention: Tensor, sensitivity: Tensor | None, ranks: Ranks) -> None:
        self._attention, self._sensitivity, self._ranks = attention, sensitivity, ranks
        self._weighed = (
            torch.zeros(attention.shape[1])
            if sensitivity is None
            else (attention * sensitivity)[1:].sum(0)
        )
        self.seen: SeenChange | None = None
        self._sample = torch.zeros(0, dtype=torch.int64)
        self._change: float | None = None

    def watch(
        self, read: Callable[[Tensor], ReadBack], rows: BlendRows, scores: Tensor, picked: Tensor
    ) -> None:
        """Have the change of those of the picked candidates seen that count most.

        Args:
            read: reads tokens at some positions, [tokens], int64.
            scores: of all candidates.
            picked: which of them, [picked], int64, ascending.
        """
        if self._sensitivity is None or not len(picked):
            return
        sample = picked[pick(scores[picked], SAMPLED)]
        self._sample = sample
        self.seen = SeenChange(read(rows.positions[rows.candidates[sample]]), self._ranks)

    def take(self) -> None:
        """End the watch, over all ranks."""
        if self.seen is None:
            return
        assert self._sensitivity is not None
        attention = self._attention[LOOKED_AT, self._sample]
        off = self._ranks.of_all_layers(self.seen.squares).sqrt()[LOOKED_AT]
        expected = float((attention * self._sensitivity[LOOKED_AT, self._sample]).sum())
        self._change = float((attention * off).sum()) / expected if expected > 0 else 0.0
        self.seen = None

    def loss(self, picked: Tensor) -> float | None:
        """Nats a token; None where nothing was seen."""
        if self._change is None:
            return None
        share = left_share(self._weighed, picked)
        return expected_loss(share, self._change, len(self._weighed))

    def pick_for(self, promise: float, scores: Tensor) -> Tensor:
        """The candidates that have to be computed for `promise`; all where that cannot be told."""
        count = len(scores)
        if self._change is not None:
            count = needed(self._weighed, scores, self._change, promise)
        return pick(scores, count)
