"""How overlapping runs share the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv_rag.reuse import Span
from semkv_rag.reuse.overlap import resolve

from .reference import greedy_tokens, most_tokens


def run(name: str, dst: int, end: int, *, exact: bool = False) -> Span:
    return Span(name, src=3, dst=dst, length=end - dst, base=dst - 3 if exact else 0, exact=exact)


def places(spans: list[Span]) -> list[tuple[str, int, int]]:
    return [(span.chunk_id, span.dst, span.end) for span in spans]


def test_apart_runs_are_kept_whole() -> None:
    runs = [run("b", 30, 60), run("a", 0, 20)]
    assert resolve(runs, 12) == runs[::-1]


def test_left_neighbour_keeps_what_is_shared() -> None:
    spans = resolve([run("a", 0, 40), run("b", 30, 70)], 12)
    assert places(spans) == [("a", 0, 40), ("b", 40, 70)]
    assert spans[1].src == 13


def test_cut_moves_left_when_the_rest_would_be_too_short() -> None:
    assert places(resolve([run("a", 0, 40), run("b", 30, 45)], 12)) == [
        ("a", 0, 33),
        ("b", 33, 45),
    ]


def test_fewest_spans_cover() -> None:
    runs = [run("a", 0, 30), run("b", 10, 50), run("c", 25, 80), run("d", 45, 90)]
    assert places(resolve(runs, 12)) == [("a", 0, 30), ("c", 30, 78), ("d", 78, 90)]


def test_two_that_do_not_both_fit() -> None:
    assert places(resolve([run("a", 0, 14), run("b", 6, 20)], 12)) == [("a", 0, 14)]


def test_first_named_wins_at_the_same_place() -> None:
    assert places(resolve([run("x", 0, 20), run("a", 0, 20)], 12)) == [("x", 0, 20)]


def test_exact_run_is_not_cut_for_an_inexact_one() -> None:
    runs = [run("a", 0, 40), run("e", 20, 50, exact=True), run("b", 45, 60)]
    assert places(resolve(runs, 12)) == [("a", 0, 20), ("e", 20, 50)]


def test_no_runs() -> None:
    assert resolve([], 12) == []


@st.composite
def drawn_runs(draw: st.DrawFn) -> list[Span]:
    count = draw(st.integers(0, 9))
    runs = []
    for number in range(count):
        dst = draw(st.integers(0, 50))
        length = draw(st.integers(5, 25))
        runs.append(run(str(number), dst, dst + length, exact=draw(st.booleans())))
    return runs


@pytest.mark.slow
@settings(max_examples=300)
@given(runs=drawn_runs())
def test_most_tokens_are_covered(runs: list[Span]) -> None:
    spans = resolve(runs, 5)
    by_name = {run.chunk_id: run for run in runs}
    edges = [(0, 0)]
    for span in spans:
        origin = by_name[span.chunk_id]
        assert origin.dst <= span.dst
        assert span.end <= origin.end
        assert span.src - origin.src == span.dst - origin.dst
        assert (span.base, span.exact) == (origin.base, origin.exact)
        assert span.length >= 5
        assert span.dst >= edges[-1][1]
        edges.append((span.dst, span.end))

    exact = [run for run in runs if run.exact]
    kept = [span for span in spans if span.exact]
    assert sum(span.length for span in kept) == most_tokens(exact, 0, 80, 5)
    other = [run for run in runs if not run.exact]
    bounds = [0, *(edge for span in kept for edge in (span.dst, span.end)), 80]
    gaps = zip(bounds[::2], bounds[1::2], strict=True)
    best = sum(most_tokens(other, start, end, 5) for start, end in gaps)
    assert sum(span.length for span in spans if not span.exact) == best
    if not exact:
        assert best >= greedy_tokens(other, 5)


@pytest.mark.parametrize("exact", [False, True])
def test_order_of_the_runs_does_not_matter_but_at_the_same_place(exact: bool) -> None:
    runs = [run("a", 0, 30, exact=exact), run("b", 10, 50), run("c", 25, 80), run("d", 60, 75)]
    assert resolve(runs, 12) == resolve(runs[::-1], 12)
