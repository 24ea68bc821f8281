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
        # By place, end and whether it is exact: how its context fits, number, chunk and diagonal.
        self._found: dict[tuple[int, int, bool], tuple[Rank, int, Laid]] = {}
        self._worst: dict[int, Rank] = {}  # by diagonal
        self._ranks: dict[tuple[int, int], tuple[Rank, TokenArray]] = {}
        self._before_images: dict[int, int] = {}  # by number
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
        diagonals = np.array([chunk.diagonal for chunk in laid])
        sizes = np.array([len(chunk.stored.tokens) for chunk in laid])
        lows = np.maximum(diagonals, 0)
        highs = np.maximum(lows, np.minimum(diagonals + sizes, len(self._prompt)))
        # Between two of them a token that differs, so that no run goes on from one to the next.
        here, stored = [_END[0]], [_END[1]]
        for chunk, low, high in zip(laid, lows.tolist(), highs.tolist(), strict=True):
            here += (self._prompt[low:high], _END[0])
            stored += (chunk.stored.tokens[low - chunk.diagonal : high - chunk.diagonal], _END[1])
        same = np.concatenate(here) == np.concatenate(stored)
        edges = (same[1:] != same[:-1]).nonzero()[0] + 1
        long = (edges[1::2] - edges[::2] >= self._shortest).nonzero()[0]
        starts, ends = edges[2 * long], edges[2 * long + 1]
        behind = np.cumsum(highs - lows + 1)
        owners = np.searchsorted(behind, starts - 1, side="right")
        dst = starts - 1 - (behind - (highs - lows + 1))[owners] + lows[owners]
        for owner, place, end in zip(
            owners.tolist(), dst.tolist(), (dst + ends - starts).tolist(), strict=True
        ):
            self._add(laid[owner], place, end)

    def _add(self, chunk: Laid, dst: int, end: int) -> None:
        """Keep a run, as far as it may serve; of runs with the same ends the preferred one."""
        diagonal = chunk.diagonal
        fit = self._rank(chunk.stored, diagonal)
        exact = not fit.inexact and dst == diagonal
        if not exact:  # what has seen an image serves behind that very image alone
            before_images = self._before_images.get(chunk.number)
            if before_images is None:
                before_images = self._before_images[chunk.number] = chunk.stored.before_images
            end = min(end, diagonal + before_images)
            if end - dst < self._shortest:
                return
        # Behind other tokens than the chunk's own no context makes a run exact.
        here = fit if fit.inexact is not exact else fit._replace(inexact=not exact)
        worst = self._worst.get(diagonal)
        if worst is None or here > worst:
            self._worst[diagonal] = here
        key = dst, end, exact
        known = self._found.get(key)
        if known is not None and known[:2] <= (here, chunk.number):
            return
        self._found[key] = here, chunk.number, chunk
        self._ends[dst] = max(self._ends[dst], end)
        if exact:
            self._exact_ends[dst] = max(self._exact_ends[dst], end)

    def _rank(self, stored: StoredTokens, diagonal: int) -> Rank:
        """How a chunk's context fits; exact only where its KV is stored as it was computed.

        Chunks share contexts, and are compared in turn.
        """
        key = id(stored.context), diagonal
        if key not in self._ranks:
            # With the context, so that no other takes its place in memory.
            fit = rank(stored.context, self._prompt, diagonal)
            self._ranks[key] = fit, stored.context
        fit = self._ranks[key][0]
        return fit if stored.lossless else fit._replace(inexact=True)

    def would_improve(self, stored: StoredTokens, diagonal: int) -> bool:
        """Whether a chunk at `diagonal` has a context that fits better than one of a run found there.

        Where none was found there, the place lies inside other runs: then whether it fits at all.
        """
        fit = self._rank(stored, diagonal)
        worst = self._worst.get(diagonal)
        return fit < worst if worst is not None else not fit.inexact or fit.fitting < 0

    def preferred_first(self) -> list[Span]:
        """All runs; of runs at the same place those whose context fits best, then the oldest."""
        preferred = sorted(self._found.items(), key=lambda found: found[1][:2])
        return [
            Span(
                chunk.chunk_id,
                dst - chunk.diagonal,
                dst,
                end - dst,
                len(chunk.stored.context),
                exact,
                chunk.stored.codec,
            )
            for (dst, end, exact), (_, _, chunk) in preferred
        ]
