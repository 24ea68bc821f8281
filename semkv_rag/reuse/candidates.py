"""Candidates: where chunks may stand in a prompt, judged by their windows' hits alone.

Made once per match, before any chunk's tokens are fetched. The hits tell more than that a chunk is
there: a run longer than the hits show would have hit the next window too. So each candidate comes
with bounds that no common run of it exceeds, and one whose bounds lie inside a run that is already
verified needs no look.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from semkv_rag.reuse.windows import IntArray, shortest_stride, strides_of

BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Hits:
    """Windows of the prompt that have the hash of a stored chunk's window, [hits] each.

    Attributes:
        numbers: the chunks' numbers in the index, rising with age.
        lengths: the chunks' tokens.
        src: where the window starts in the chunk.
        at: where the window starts in the prompt.
    """

    numbers: IntArray
    lengths: IntArray
    src: IntArray
    at: IntArray


class Candidates:
    """A prompt's candidates, each a chunk at a diagonal, i.e. at one offset of the prompt.

    In the order of their numbers, then of their diagonals.

    Args:
        hits: all hits, but for those left out at crowded windows; at least one.
        crowded: for each window of the prompt whether hits were left out, [windows].
        window: tokens of a window.
    """

    def __init__(self, hits: Hits, crowded: BoolArray, window: int) -> None:
        prompt_tokens = len(crowded) + window - 1
        diagonals = hits.at - hits.src
        places = (hits.numbers << 32) + diagonals
        order = np.argsort(places, kind="stable")
        places, at = places[order], hits.at[order]
        firsts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        one = order[firsts]
        self.numbers = hits.numbers[one]
        self.diagonals = diagonals[one]
        lengths = hits.lengths[one]
        self._strides = strides_of(lengths, window)
        # The first window before the hits, and behind them, that a run would have hit as well.
        last = len(crowded) - 1
        first_hits, last_hits = np.minimum.reduceat(at, firsts), np.maximum.reduceat(at, firsts)
        before = last - _next_misses(crowded[::-1], last - first_hits, self._strides)
        behind = _next_misses(crowded, last_hits, self._strides)
        self.low = np.maximum(np.maximum(self.diagonals, 0), before + 1)
        ends = np.minimum(self.diagonals + lengths, prompt_tokens)
        self.high = np.minimum(ends, behind + window - 1)
        self._shortest = window + shortest_stride(window) - 1
        self._open = self.high - self.low >= self._shortest

    def cover(self, reach: IntArray) -> IntArray:
        """As few candidates as together cover what the open ones may add to the verified runs.

        Only open candidates that may add a span's worth of tokens count here.

        Args:
            reach: the furthest end of a verified run that starts at or before each position,
                [prompt tokens + 1].
        """
        fresh: IntArray = np.cumsum(
            reach <= np.arange(len(reach))
        )  # uncovered positions up to each one
        before = np.concatenate(([0], fresh))
        added = before[self.high] - before[self.low]
        chosen: IntArray = np.flatnonzero(self._open & (added >= self._shortest))
        if not len(chosen):
            return chosen
        # By start, then the longest, then the oldest, by whose numbers they are in order already.
        order = np.argsort((self.low[chosen] << 32) - self.high[chosen], kind="stable")
        chosen = chosen[order]
        furthest_before = np.maximum.accumulate(np.concatenate(([0], self.high[chosen][:-1])))
        chosen = chosen[self.high[chosen] > furthest_before]
        low, high, uncovered = self.low[chosen].tolist(), self.high[chosen].tolist(), fresh.tolist()
        cover: list[int] = []
        position, index = 0, -1
        while True:
            # On to the next position that no verified run covers.
            seen = uncovered[position - 1] if position else 0
            position = bisect_left(uncovered, seen + 1, position)
            widest = bisect_right(low, position) - 1
            if widest == index or high[widest] <= position:
                widest += 1  # none holds the position: on to the next candidate
            if widest >= len(chosen):
                return chosen[cover]
            cover.append(widest)
            position, index = high[widest], widest

    def undecided(self, reach: IntArray) -> IntArray:
        """Open candidates that no verified run holds, the longest first, then the oldest."""
        return self._longest_first(self._open & (reach[self.low] < self.high))

    def starts(self, exact_reach: IntArray) -> IntArray:
        """Open candidates whose chunk may stand there almost from its first token, in the same order.

        They may be exact, or have a context that fits better than that of a run at the same place.

        Args:
            exact_reach: as for `cover`, of exact runs alone.
        """
        at_start = self.low - self.diagonals < self._strides
        return self._longest_first(self._open & at_start & (exact_reach[self.low] < self.high))

    def _longest_first(self, chosen: BoolArray) -> IntArray:
        indices: IntArray = np.flatnonzero(chosen)
        shortness = self.low[indices] - self.high[indices]
        longest_first: IntArray = indices[np.argsort(shortness, kind="stable")]
        return longest_first

    def close(self, indices: IntArray) -> None:
        """Leave these candidates out from now on."""
        self._open[indices] = False


def _next_misses(crowded: BoolArray, at: IntArray, strides: IntArray) -> IntArray:
    """The first window for each i, of `at[i] + strides[i]`, `at[i] + 2 * strides[i]`, ..., that is not
    crowded. A chunk that hits at `at[i]` and not there has another token there.
    """
    behind = at + strides
    near = behind[behind < len(crowded)]
    if crowded[near].any():
        for stride in np.unique(strides).tolist():
            mine = strides == stride
            behind[mine] = _next_miss(crowded, stride)[at[mine]]
    return behind


def _next_miss(crowded: BoolArray, stride: int) -> IntArray:
    """`_next_misses` of all windows, [windows]; where all windows up to the prompt's end are crowded,
    the first place behind it.
    """
    windows = len(crowded)
    rows = -(-windows // stride) + 1
    places = np.arange(rows * stride)
    free = np.ones(rows * stride, dtype=np.bool_)
    free[:windows] = ~crowded
    columns = np.where(free, places, rows * stride).reshape(rows, stride)
    at_or_after = np.minimum.accumulate(columns[::-1], axis=0)[::-1].reshape(-1)
    first_free: IntArray = at_or_after[stride : stride + windows]
    return first_free
