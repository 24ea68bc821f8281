"""Finds stored chunks in a prompt, on tokens.

One `ChunkIndex` per model and namespace lives in the scheduler process. `match` is called once per
request, `add` and `remove` whenever the store's change feed brings something.

How a match goes: the prompt's windows are looked up at every offset; what they hit are candidates,
each with bounds on what it may cover; the chunks' tokens are fetched for as few candidates as cover
all that can be covered, and compared along the whole chunk; then overlaps are resolved. A hash alone
never counts. docs/internals-reuse.md has the guarantees and the limits.

Chunks are in memory, or in a file that the index begins with (`base`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from semkv_rag.reuse.base import Base, packed
from semkv_rag.reuse.candidates import Candidates
from semkv_rag.reuse.look_up import candidates_in
from semkv_rag.reuse.overlap import resolve
from semkv_rag.reuse.plan import Span
from semkv_rag.reuse.recent import RecentTokens
from semkv_rag.reuse.runs import Laid, Runs
from semkv_rag.reuse.segment import MAX_WINDOWS, Segment
from semkv_rag.reuse.tokens import StoredTokens, TokenArray
from semkv_rag.reuse.windows import (
    IntArray,
    chunk_hashes,
    shortest_stride,
    strides_of,
    window_counts,
)

_SPARE = 64
"""Candidates that may turn out shorter than they looked, beyond those that fit into the prompt."""

_AGAIN = 128
"""How many candidates are still verified after a first round that seemed to cover everything."""

_EXTRA = 64
"""Candidates that are verified for what little they may add."""

_CONTEXTS = 128
"""Candidates that are looked at for a better context."""

_TOKENS_PER_CONTEXT = 64
"""Tokens of a long prompt for each candidate that is looked at for a better context."""

_BATCH = 32
"""Candidates of those that are verified before the rest is judged again."""

_BLOCK_WINDOWS = 1 << 20
"""Windows that are hashed and sorted at a time; bounds the memory `add` takes."""

_SMALL_WINDOWS = 1 << 14
"""Segments up to this size are always merged, so that there are few."""

_DEAD_SHARE = 0.25
"""A segment with more windows of removed chunks is rewritten without them."""

_UNSEARCHABLE = -1
"""The number of chunks too short for a window."""


class ChunkIndex:
    """The chunks of one model and namespace, found in a prompt at any offset. Not thread safe.

    Args:
        tokens_of: gives the stored tokens of chunks, by id; ids it does not know are left out.
            Called a few times per match, with few ids. What it raises, `match` raises.
        window: tokens of an indexed window, at least 2. See `shortest_run`.
        base: chunks that are there from the beginning, the oldest ones. Of the same window.
    """

    def __init__(
        self,
        tokens_of: Callable[[Sequence[str]], Mapping[str, StoredTokens]],
        *,
        window: int = 8,
        base: Base | None = None,
    ) -> None:
        self._window = window
        self._base = base
        self._first = 0 if base is None else len(base)  # number of those that came later
        self._base_removed = 0
        self._segments: list[Segment] = []  # oldest first, without the base's
        self._numbers: dict[str, int] = {}
        self._ids: list[str | None] = []  # by number, without the base's; None when removed
        self._id_bytes = 0
        self._recent = RecentTokens(tokens_of)

    @property
    def shortest_run(self) -> int:
        """No shorter span is returned; 12 tokens for windows of 8. See `sure_run`."""
        return self._window + shortest_stride(self._window) - 1

    def sure_run(self, chunk_tokens: int) -> int:
        """Common runs with a chunk of so many tokens are found when they have at least these.

        12 for windows of 8 tokens in chunks of up to 112, and 32 in chunks above 412.
        """
        return self._window + int(strides_of(np.array([chunk_tokens]), self._window)[0]) - 1

    def __len__(self) -> int:
        return self._first - self._base_removed + len(self._numbers)

    @property
    def beside_base(self) -> int:
        """How many chunks came or went since the base: those in which this index differs from it."""
        return len(self._numbers) + self._base_removed

    @property
    def nbytes(self) -> int:
        """Bytes of memory the index takes, ids included, without the cache of recent tokens.

        What lies in the base's file is not among them.
        """
        per_chunk = sys.getsizeof(self._ids) + sys.getsizeof(self._numbers) + self._id_bytes
        return per_chunk + sum(segment.nbytes for segment in self._all_segments())

    def ids(self) -> list[str]:
        """The ids of all chunks."""
        base = [] if self._base is None else self._base.live_ids()
        return [*base, *self._numbers]

    def add(self, chunks: Iterable[tuple[str, TokenArray]]) -> None:
        """Index chunks, by id and tokens; ids that are indexed already are passed over."""
        iterator = iter(chunks)
        more = True
        while more:
            batch: list[tuple[str, TokenArray]] = []
            windows = 0
            more = False
            try:
                for chunk_id, tokens in iterator:
                    batch.append((chunk_id, tokens))
                    windows += len(tokens) // shortest_stride(self._window)
                    if windows >= _BLOCK_WINDOWS:
                        more = True
                        break
            finally:
                self._add_block(batch)

    def remove(self, ids: Iterable[str]) -> None:
        """Never return these chunks again; unknown ids are passed over."""
        touched: set[int] = set()
        others: list[str] = []
        for chunk_id in ids:
            number = self._numbers.pop(chunk_id, None)
            if number is None:
                others.append(chunk_id)
                continue
            self._id_bytes -= sys.getsizeof(chunk_id) + sys.getsizeof(number)
            if number == _UNSEARCHABLE:
                continue
            self._ids[number - self._first] = None
            self._recent.forget(number)
            index = self._segment_of(number)
            self._segments[index].remove(number)
            touched.add(index)
        for index in touched:
            if self._segments[index].dead_share > _DEAD_SHARE:
                self._segments[index] = Segment.merged([self._segments[index]])
        self._segments = [segment for segment in self._segments if len(segment)]
        if self._base is not None and others:
            for number in self._base.live_numbers(others).values():
                self._base.segment.remove(number)
                self._base_removed += 1
                self._recent.forget(number)

    def pack(self) -> Callable[[], dict[str, NDArray[Any]] | None]:
        """The sections of a file with all that is indexed now, for `Base`.

        Returns:
            Makes them: in another thread, if need be, while this index is used and changed. What it
            makes is None when a file cannot hold that many chunks, or their ids.
        """
        return partial(packed, self._base, self._all_segments(), self._first, self._ids.copy())

    def match(self, prompt: TokenArray) -> list[Span]:
        """The stored chunks in `prompt`.

        Returns:
            Spans of at least `shortest_run` tokens in prompt order, none overlapping another;
            chosen as `semkv_rag.reuse.overlap` says. Of chunks that hold the same tokens, the one
            that is exact here is taken, else the one whose context fits best
            (`semkv_rag.reuse.fit`), else the oldest.
        """
        tokens = np.asarray(prompt)
        if len(tokens) < self.shortest_run:
            return []
        if tokens.dtype != np.int32:
            tokens = tokens.astype(np.int64)
        candidates = candidates_in(self._all_segments(), tokens, self._window)
        if candidates is None:
            return []
        runs = Runs(tokens, self.shortest_run)
        left = len(tokens) // self.shortest_run + _SPARE
        while len(chosen := candidates.cover(runs.reach)[:left]):
            self._verify(candidates, chosen, runs)
            left = min(left - len(chosen), _AGAIN)
        left = _EXTRA
        while len(chosen := candidates.undecided(runs.reach)[: min(left, _BATCH)]):
            self._verify(candidates, chosen, runs)
            left -= len(chosen)
        most = max(_CONTEXTS, len(tokens) // _TOKENS_PER_CONTEXT)
        starts = candidates.starts(runs.exact_reach)[:most]
        self._verify(candidates, self._better_contexts(candidates, starts, runs), runs)
        return resolve(runs.preferred_first(), self.shortest_run)

    def _all_segments(self) -> list[Segment]:
        """The base's and the others, oldest first."""
        base = [] if self._base is None else [self._base.segment]
        return base + self._segments

    def _add_block(self, block: Sequence[tuple[str, TokenArray]]) -> None:
        """Write a segment of these chunks and merge it with the last ones that are not larger."""
        there = {} if self._base is None else self._base.live_numbers([id_ for id_, _ in block])
        first = dict(reversed(block))  # of an id's tokens the first ones
        new = {id_: first[id_] for id_, _ in block if not (id_ in self._numbers or id_ in there)}
        counts = window_counts(np.array([len(tokens) for tokens in new.values()]), self._window)
        numbers: list[int] = []
        added: list[TokenArray] = []
        for (chunk_id, tokens), count in zip(new.items(), counts.tolist(), strict=True):
            number = _UNSEARCHABLE
            if 0 < count <= MAX_WINDOWS:
                number = self._first + len(self._ids)
                self._ids.append(chunk_id)
                numbers.append(number)
                added.append(tokens)
            self._numbers[chunk_id] = number
            self._id_bytes += sys.getsizeof(chunk_id) + sys.getsizeof(number)
        if added:
            self._add_segment(numbers, added)

    def _add_segment(self, numbers: Sequence[int], added: Sequence[TokenArray]) -> None:
        lengths = np.array([len(tokens) for tokens in added])
        merged = [
            Segment.build(
                chunk_hashes(added, self._window),
                np.array(numbers, dtype=np.uint32),
                lengths.astype(np.uint32),
                window_counts(lengths, self._window),
            )
        ]
        total = len(merged[0])
        while self._segments:
            size = len(self._segments[-1])
            if size > max(2 * total, _SMALL_WINDOWS) or total + size > MAX_WINDOWS:
                break
            merged.append(self._segments.pop())
            total += size
        self._segments.append(Segment.merged(merged[::-1]) if len(merged) > 1 else merged[0])

    def _segment_of(self, number: int) -> int:
        """The index of the segment that holds the chunk with this number."""
        low, high = 0, len(self._segments) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._segments[middle].numbers[0] <= number:
                low = middle
            else:
                high = middle - 1
        return low

    def _better_contexts(self, candidates: Candidates, starts: IntArray, runs: Runs) -> IntArray:
        """Those of `starts` whose stored context fits their place better than what is found there."""
        stored = self._recent.get(dict.fromkeys(candidates.numbers[starts].tolist()), self._id_of)
        chosen = []
        for index in starts.tolist():
            _, chunk = stored.get(int(candidates.numbers[index]), (None, None))
            if chunk is not None and runs.would_improve(chunk, int(candidates.diagonals[index])):
                chosen.append(index)
        return np.array(chosen, dtype=np.int64)

    def _verify(self, candidates: Candidates, chosen: IntArray, runs: Runs) -> None:
        """Compare these candidates' tokens with the prompt's."""
        numbers = candidates.numbers[chosen].tolist()
        stored = self._recent.get(dict.fromkeys(numbers), self._id_of)
        runs.verify(
            [
                Laid(number, *stored[number], diagonal)
                for number, diagonal in zip(
                    numbers, candidates.diagonals[chosen].tolist(), strict=True
                )
                if number in stored
            ]
        )
        candidates.close(chosen)

    def _id_of(self, number: int) -> str | None:
        if number < self._first:
            assert self._base is not None
            return self._base.id_of(number)
        return self._ids[number - self._first]
