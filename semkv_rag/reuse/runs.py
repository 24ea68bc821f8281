"""Verified runs: tokens of stored chunks that stand in the prompt, compared one by one."""

from __future__ import annotations

import numpy as np

from semkv_rag.reuse.fit import Rank, rank
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
        self._found: list[tuple[Rank, int, Span]] = []  # how its context fits, number, span
        self._worst: dict[int, Rank] = {}  # by diagonal
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
        fit = self._fit(stored, diagonal)
        for index in (bounds[1:] - bounds[:-1] > self._shortest).nonzero()[0].tolist():
            dst, end = int(bounds[index]) + 1, int(bounds[index + 1])
            exact = not fit.inexact and dst == diagonal
            if not exact:  # what has seen an image serves behind that very image alone
                end = min(end, diagonal + stored.before_images)
                if end - dst < self._shortest:
                    continue
            base = len(stored.context)
            span = Span(chunk_id, dst - diagonal, dst, end - dst, base, exact, stored.codec)
            # Behind other tokens than the chunk's own no context makes a run exact.
            here = fit._replace(inexact=not exact)
            self._found.append((here, number, span))
            self._worst[diagonal] = max(here, self._worst.get(diagonal, here))
            self._ends[dst] = max(self._ends[dst], end)
            if exact:
                self._exact_ends[dst] = max(self._exact_ends[dst], end)

    def would_improve(self, stored: StoredTokens, diagonal: int) -> bool:
        """Whether a chunk at `diagonal` has a context that fits better than one of a run found there.

        Where none was found there, the place lies inside other runs: then whether it fits at all.
        """
        fit = self._fit(stored, diagonal)
        worst = self._worst.get(diagonal)
        return fit < worst if worst is not None else not fit.inexact or fit.fitting < 0

    def _fit(self, stored: StoredTokens, diagonal: int) -> Rank:
        """How a chunk's context fits; exact only where its KV is stored as it was computed."""
        fit = rank(stored.context, self._prompt, diagonal)
        return fit if stored.lossless else fit._replace(inexact=True)

    def preferred_first(self) -> list[Span]:
        """All runs; of runs at the same place those whose context fits best, then the oldest."""
        return [span for _, _, span in sorted(self._found, key=lambda run: run[:2])]
