"""Which of the found runs are reused where they overlap.

Called once per match. Overlaps are ordinary: splitters make chunks overlap, chunks nest in stored
prompts, and boilerplate stands in many chunks. The result has no overlaps, is in prompt order, and
depends on nothing but the runs and their order:

1. Exact runs come first and keep all they can: their KV is right and costs no recompute.
2. What is left of the prompt goes to the other runs so that most tokens are covered, and with as
   few spans as that takes.

A run may be cut at either end to make room, down to `shortest` tokens. Of two neighbours the left
one keeps the tokens they share: the first tokens of a chunk are those whose KV suffers most from
the missing context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from semkv_rag.reuse.plan import Span


def resolve(runs: Iterable[Span], shortest: int) -> list[Span]:
    """Cut `runs` into spans that do not overlap, each of at least `shortest` tokens.

    Args:
        runs: common runs of at least `shortest` tokens, the preferred one first where several stand
            at the same place.
        shortest: tokens a span must have to be kept.
    """
    exact: list[Span] = []
    other: list[Span] = []
    for run in runs:
        (exact if run.exact else other).append(run)
    taken = _cover(exact, shortest)
    gap_start = 0
    spans: list[Span] = []
    for span in taken:
        spans += _cover(_clip(other, gap_start, span.dst, shortest), shortest)
        spans.append(span)
        gap_start = span.end
    last = max((run.end for run in other), default=0)
    spans += _cover(_clip(other, gap_start, last, shortest), shortest)
    return spans


def _cut(run: Span, start: int, end: int) -> Span:
    """The part of `run` that stands at `start` to `end` of the prompt."""
    if (start, end) == (run.dst, run.end):
        return run
    return replace(run, src=run.src + start - run.dst, dst=start, length=end - start)


def _clip(runs: Iterable[Span], start: int, end: int, shortest: int) -> list[Span]:
    """What is left of `runs` inside `start` to `end`."""
    clipped = []
    for run in runs:
        low, high = max(run.dst, start), min(run.end, end)
        if high - low >= shortest:
            clipped.append(_cut(run, low, high))
    return clipped


def _cover(runs: Sequence[Span], shortest: int) -> list[Span]:
    """Most tokens with fewest spans, all runs being equally good."""
    spans: list[Span] = []
    for island in _islands(_widest(runs)):
        walked = _walk(island)
        if any(span.length < shortest for span in walked):
            walked = _best_cuts(island, shortest)
        spans += walked
    return spans


def _widest(runs: Sequence[Span]) -> list[Span]:
    """`runs` by start, without those that lie inside another: starts and ends both rise."""
    widest: list[Span] = []
    for run in sorted(runs, key=lambda run: (run.dst, -run.end)):
        if not widest or run.end > widest[-1].end:
            widest.append(run)
    return widest


def _islands(runs: Iterable[Span]) -> Iterator[list[Span]]:
    """Groups of runs that overlap or touch, one after another."""
    island: list[Span] = []
    for run in runs:
        if island and run.dst > island[-1].end:
            yield island
            island = []
        island.append(run)
    if island:
        yield island


def _walk(island: Sequence[Span]) -> list[Span]:
    """Covers the whole island from the left, each time with the run that reaches furthest.

    No cover has fewer spans, but the last ones may come out too short.
    """
    spans: list[Span] = []
    position, index = island[0].dst, 0
    while position < island[-1].end:
        while index + 1 < len(island) and island[index + 1].dst <= position:
            index += 1
        spans.append(_cut(island[index], position, island[index].end))
        position = island[index].end
    return spans


def _best_cuts(island: Sequence[Span], shortest: int) -> list[Span]:
    """Most tokens, then fewest spans, with every span at least `shortest` long.

    A dynamic program over the island's positions. A span may go from `q` to `p` when the run that
    reaches furthest among those that start by `q` reaches `p`; as that reach only grows with `q`,
    the best `q` of each `p` is the maximum of a sliding window.
    """
    origin = island[0].dst
    size = island[-1].end - origin
    reaching: list[int] = []
    index = 0
    for position in range(origin, origin + size):
        while index + 1 < len(island) and island[index + 1].dst <= position:
            index += 1
        reaching.append(index)

    token = size + 1  # worth more than any number of spans costs
    score = [0] * (size + 1)
    start = [-1] * (size + 1)  # of the span that ends here, or -1
    window: deque[int] = deque()  # candidates for q, falling in score[q] - q * token
    for end in range(1, size + 1):
        score[end] = score[end - 1]
        if (q := end - shortest) >= 0:
            while window and score[window[-1]] - window[-1] * token <= score[q] - q * token:
                window.pop()
            window.append(q)
        while window and island[reaching[window[0]]].end - origin < end:
            window.popleft()
        if window:
            with_span = score[window[0]] + (end - window[0]) * token - 1
            if with_span > score[end]:
                score[end], start[end] = with_span, window[0]

    spans: list[Span] = []
    end = size
    while end > 0:
        if start[end] < 0:
            end -= 1
            continue
        q = start[end]
        spans.append(_cut(island[reaching[q]], origin + q, origin + end))
        end = q
    return spans[::-1]
