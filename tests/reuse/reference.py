"""The matcher's contract in the plainest code: every diagonal of every chunk, position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from semkv_rag.reuse import Span, StoredTokens


def common_runs(
    prompt: Sequence[int], store: Mapping[str, StoredTokens], shortest: int
) -> list[Span]:
    """All maximal common runs of at least `shortest` tokens."""
    runs = []
    for chunk_id, chunk in store.items():
        tokens, context = chunk.tokens.tolist(), chunk.context.tolist()
        for diagonal in range(-len(tokens) + 1, len(prompt)):
            src = max(0, -diagonal)
            while src < len(tokens) and diagonal + src < len(prompt):
                length = 0
                while (
                    src + length < len(tokens)
                    and diagonal + src + length < len(prompt)
                    and tokens[src + length] == prompt[diagonal + src + length]
                ):
                    length += 1
                if length >= shortest:
                    dst = diagonal + src
                    exact = list(prompt[:dst]) == context + tokens[:src]
                    runs.append(Span(chunk_id, src, dst, length, len(context), exact))
                src += length + 1
    return runs


def most_tokens(runs: Sequence[Span], start: int, end: int, shortest: int) -> int:
    """The most tokens of `start` to `end` that pieces of `runs` cover without overlap."""
    best = {start: 0}
    for stop in range(start + 1, end + 1):
        best[stop] = best[stop - 1]
        for begin in range(start, stop - shortest + 1):
            if any(run.dst <= begin and stop <= run.end for run in runs):
                best[stop] = max(best[stop], best[begin] + stop - begin)
    return best[end]


def greedy_tokens(runs: Sequence[Span], shortest: int) -> int:
    """What taking the longest remaining run again and again covers, trimmed to what is free."""
    free = {position for run in runs for position in range(run.dst, run.end)}
    covered = 0
    while True:
        pieces = []
        for run in runs:
            start = run.dst
            for position in range(run.dst, run.end + 1):
                if position == run.end or position not in free:
                    pieces.append((position - start, -start))
                    start = position + 1
        length, start = max(pieces, default=(0, 0))
        if length < shortest:
            return covered
        free -= set(range(-start, -start + length))
        covered += length


def check_sound(
    prompt: Sequence[int], store: Mapping[str, StoredTokens], spans: Sequence[Span], shortest: int
) -> None:
    """Assert what holds of any answer: equal tokens, true flags, order, no overlap."""
    end = 0
    for span in spans:
        chunk = store[span.chunk_id]
        tokens, context = chunk.tokens.tolist(), chunk.context.tolist()
        assert span.dst >= end
        assert span.length >= shortest
        assert span.src >= 0
        assert tokens[span.src : span.src + span.length] == list(prompt[span.dst : span.end])
        assert span.end <= len(prompt)
        assert span.base == len(context)
        assert span.exact == (list(prompt[: span.dst]) == context + tokens[: span.src])
        end = span.end


def fitting(context: Sequence[int], prompt: Sequence[int], at: int) -> int:
    """How many tokens of a context stand before `at`: each distance tried, token by token."""
    size = len(context)
    best = 0
    for shift in range(-8, 9):

        def same(place: int, shift: int = shift) -> bool:
            there = at - size + place + shift
            return 0 <= place < size and 0 <= there < at and context[place] == prompt[there]

        runs = _true_runs([same(place) for place in range(size)])
        for start, end in runs:
            holds_window = size >= 16 and start <= size - 16 and end >= size - 8
            ends_here = shift == 0 and end == size and (end - start >= 8 or start == 0)
            if holds_window or ends_here:
                best = max(best, end - start)
    return best


def _true_runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    runs, start = [], 0
    for place in range(len(flags) + 1):
        if place == len(flags) or not flags[place]:
            if place > start:
                runs.append((start, place))
            start = place + 1
    return runs


def check_best_context(
    prompt: Sequence[int], store: Mapping[str, StoredTokens], spans: Sequence[Span]
) -> None:
    """Assert that no chunk of the same tokens would fit better where a span stands from its start."""

    def rank(chunk: StoredTokens, at: int) -> tuple[bool, int, int]:
        context = chunk.context.tolist()
        exact = list(prompt[:at]) == context
        return not exact, -fitting(context, prompt, at), -len(context)

    for span in spans:
        taken = store[span.chunk_id]
        if span.src == 0:
            best = min(
                rank(other, span.dst)
                for other in store.values()
                if np.array_equal(other.tokens, taken.tokens)
            )
            assert rank(taken, span.dst) == best
