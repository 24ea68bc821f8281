"""Verified runs: tokens of stored chunks that stand in the prompt, compared one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from semkv_rag.reuse.fit import Rank, rank
from semkv_rag.reuse.plan import Span
from semkv_rag.reuse.tokens import StoredTokens, TokenArray
from semkv_rag.reuse.windows import IntArray, Tokens

_END: Final = (np.zeros(1, dtype=np.int32), np.ones(1, dtype=np.int32))


class Laid(NamedTuple):
    """A stored chunk, its token 0 laid at the prompt's token `diagonal`.

    Attributes:
        number: of the chunk in the index, rising with age.
    """

    number: int
    chunk_id: str
    stored: StoredTokens
    diagonal: int


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
        self._ranks: dict[tuple[int, int], tuple[Rank, TokenArray]] = {}
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

    def verify(self, laid: Sequence[Laid]) -> None:
        """Compare whole chunks with the prompt, their token 0 laid at their diagonals; all at once."""
        if not laid:
            return
        lows, here, stored = [], [], []
        for chunk in laid:
            tokens, diagonal = chunk.stored.tokens, chunk.diagonal
            low = max(0, diagonal)
            high = max(low, min(len(self._prompt), diagonal + len(tokens)))
            lows.append(low)
            # Behind each a token that differs, so that no run goes on into the next chunk.
            here += (self._prompt[low:high], _END[0])
            stored += (tokens[low - diagonal : high - diagonal], _END[1])
        differ = np.concatenate(([-1], (np.concatenate(here) != np.concatenate(stored)).nonzero()[0]))
        runs = (differ[1:] - differ[:-1] > self._shortest).nonzero()[0]
        starts, ends = differ[runs] + 1, differ[runs + 1]
        behind = np.cumsum([len(piece) + 1 for piece in here[::2]])
        owners = np.searchsorted(behind, starts, side="right")
        dst = starts - np.concatenate(([0], behind))[owners] + np.array(lows)[owners]
        for owner, place, length in zip(
            owners.tolist(), dst.tolist(), (ends - starts).tolist(), strict=True
        ):
            self._add(laid[owner], place, place + length)

    def _add(self, chunk: Laid, dst: int, end: int) -> None:
        """Keep a run, as far as it may serve."""
        stored, diagonal = chunk.stored, chunk.diagonal
        fit = self._rank(stored, diagonal)
        exact = not fit.inexact and dst == diagonal
        if not exact:  # what has seen an image serves behind that very image alone
            end = min(end, diagonal + stored.before_images)
            if end - dst < self._shortest:
                return
        span = Span(chunk.chunk_id, dst - diagonal, dst, end - dst, len(stored.context), exact)
        # Behind other tokens than the chunk's own no context makes a run exact.
        here = fit._replace(inexact=not exact)
        self._found.append((here, chunk.number, span))
        self._worst[diagonal] = max(here, self._worst.get(diagonal, here))
        self._ends[dst] = max(self._ends[dst], end)
        if exact:
            self._exact_ends[dst] = max(self._exact_ends[dst], end)

    def _rank(self, stored: StoredTokens, diagonal: int) -> Rank:
        """How a chunk's context fits; chunks share contexts, and are compared in turn."""
        key = id(stored.context), diagonal
        if key not in self._ranks:
            # With the context, so that no other takes its place in memory.
            fit = rank(stored.context, self._prompt, diagonal)
            self._ranks[key] = fit, stored.context
        return self._ranks[key][0]

    def would_improve(self, stored: StoredTokens, diagonal: int) -> bool:
        """Whether a chunk at `diagonal` has a context that fits better than one of a run found there.

        Where none was found there, the place lies inside other runs: then whether it fits at all.
        """
        fit = self._rank(stored, diagonal)
        worst = self._worst.get(diagonal)
        return fit < worst if worst is not None else not fit.inexact or fit.fitting < 0

    def preferred_first(self) -> list[Span]:
        """All runs; of runs at the same place those whose context fits best, then the oldest."""
        return [span for _, _, span in sorted(self._found, key=lambda run: run[:2])]
