"""Verified runs: tokens of stored chunks that stand in the prompt, compared one by one."""

from __future__ import annotations

import numpy as np

from semkv_rag.reuse.plan import Span
from semkv_rag.reuse.tokens import StoredTokens
from semkv_rag.reuse.windows import IntArray, Tokens


class Runs:
    """The runs verified so far in one prompt.

    Args:
        prompt: [tokens].
        shortest: tokens of the shortest run that counts.
    """

    def __init__(self, prompt: Tokens, shortest: int) -> None:
        self._prompt = prompt
        self._shortest = shortest
        self._found: list[tuple[int, int, Span]] = []  # context tokens to the left, number, span
        self._ends = np.zeros(len(prompt) + 1, dtype=np.int64)
        self._exact_ends = np.zeros(len(prompt) + 1, dtype=np.int64)

    @property
    def reach(self) -> IntArray:
        """The furthest end of a run that starts at or before each position, [tokens + 1]."""
        return np.maximum.accumulate(self._ends)

    @property
    def exact_reach(self) -> IntArray:
        """The same of exact runs alone, [tokens + 1]."""
        return np.maximum.accumulate(self._exact_ends)

    def verify(self, number: int, chunk_id: str, stored: StoredTokens, diagonal: int) -> None:
        """Compare a whole chunk with the prompt, its token 0 laid at `diagonal`."""
        low = max(0, diagonal)
        high = min(len(self._prompt), diagonal + len(stored.tokens))
        differ = self._prompt[low:high] != stored.tokens[low - diagonal : high - diagonal]
        bounds = np.concatenate(([low - 1], low + differ.nonzero()[0], [high]))
        for index in (bounds[1:] - bounds[:-1] > self._shortest).nonzero()[0].tolist():
            dst, end = int(bounds[index]) + 1, int(bounds[index + 1])
            base = len(stored.context)
            left = self._left(stored, dst) if dst == diagonal else 0
            exact = left == dst == base and dst == diagonal
            if not exact:  # what has seen an image serves behind that very image alone
                end = min(end, diagonal + stored.before_images)
                if end - dst < self._shortest:
                    continue
            span = Span(chunk_id, dst - diagonal, dst, end - dst, base, exact)
            self._found.append((left, number, span))
            self._ends[dst] = max(self._ends[dst], end)
            if exact:
                self._exact_ends[dst] = max(self._exact_ends[dst], end)

    def preferred_first(self) -> list[Span]:
        """All runs; of runs at the same place those with most context to the left, then oldest."""
        return [span for _, _, span in sorted(self._found, key=lambda run: (-run[0], run[1]))]

    def _left(self, stored: StoredTokens, dst: int) -> int:
        """How many tokens of the stored context stand before `dst` in the prompt too."""
        most = min(len(stored.context), dst)
        differ = self._prompt[dst - most : dst] != stored.context[len(stored.context) - most :]
        return int(np.argmax(differ[::-1])) if differ.any() else most
