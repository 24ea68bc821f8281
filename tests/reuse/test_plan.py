"""The plan made of spans: what it covers, what it promises, what its digest tells apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.reuse import ReusePlan, Span, make_plan

OPTIONS = ReuseOptions()
EXACT = Span("prefix", src=0, dst=0, length=20, base=0, exact=True)
MOVED = Span("a", src=2, dst=25, length=30, base=20)


def plan(*spans: Span, tokens: int = 100, options: ReuseOptions = OPTIONS) -> ReusePlan:
    made = make_plan(spans, tokens, options)
    assert made is not None
    return made


def test_span_says_where_it_ends_and_how_far_its_keys_move() -> None:
    assert MOVED.end == 55
    assert MOVED.shift == 25 - 22
    assert EXACT.shift == 0


def test_plan_covers_up_to_the_last_span() -> None:
    made = plan(EXACT, MOVED)
    assert made.spans == (EXACT, MOVED)
    assert made.covered == 55
    assert (made.exact_tokens, made.reused_tokens) == (20, 30)


@pytest.mark.parametrize("tokens", [55, 54, 40, 27])
def test_last_token_is_never_covered(tokens: int) -> None:
    made = plan(EXACT, MOVED, tokens=tokens)
    assert made.covered == tokens - 1
    assert made.spans[-1] == replace(MOVED, length=tokens - 1 - 25)


def test_spans_behind_the_limit_are_left_out() -> None:
    assert plan(EXACT, MOVED, tokens=26).spans == (EXACT,)
    assert plan(EXACT, MOVED, tokens=26).covered == 20


def test_nothing_to_reuse_is_no_plan() -> None:
    assert make_plan([], 100, OPTIONS) is None
    assert make_plan([MOVED], 26, OPTIONS) is None
    assert make_plan([EXACT], 1, OPTIONS) is None


def test_first_inexact_token() -> None:
    assert plan(EXACT, MOVED).first_inexact == 25
    assert plan(EXACT).first_inexact is None
    assert plan(MOVED, options=ReuseOptions(ratio=1.0)).first_inexact is None
    # `none` computes nothing whatever the ratio: its blocks must not pass for exact ones.
    none = ReuseOptions(ratio=1.0, selector="none")
    assert plan(MOVED, options=none).first_inexact is not None
    assert plan(MOVED, options=ReuseOptions(selector="all")).first_inexact is None
    assert plan(MOVED, options=ReuseOptions(ratio=0.0)).first_inexact == 25


@pytest.mark.parametrize(
    "other",
    [
        plan(MOVED),
        plan(EXACT),
        plan(replace(EXACT, exact=False), MOVED),
        plan(EXACT, replace(MOVED, chunk_id="b")),
        plan(EXACT, replace(MOVED, src=3)),
        plan(EXACT, replace(MOVED, dst=26)),
        plan(EXACT, replace(MOVED, length=29)),
        plan(EXACT, MOVED, tokens=50),
        plan(EXACT, MOVED, options=ReuseOptions(ratio=0.2)),
        plan(EXACT, MOVED, options=ReuseOptions(selector="chunk_head")),
        plan(EXACT, MOVED, options=ReuseOptions(check_layer=2)),
        plan(EXACT, MOVED, options=ReuseOptions(namespace="tenant")),
    ],
)
def test_digest_tells_plans_apart(other: ReusePlan) -> None:
    assert plan(EXACT, MOVED).digest() != other.digest()


def test_digest_of_equal_plans_is_equal() -> None:
    assert plan(EXACT, MOVED).digest() == plan(EXACT, MOVED, tokens=200).digest()
    assert len(plan(EXACT).digest()) == 32


def test_an_exact_prompt_prefix() -> None:
    first = Span("a", src=0, dst=0, length=20, exact=True)
    second = Span("b", src=0, dst=20, length=10, base=20, exact=True)
    behind_gap = replace(second, dst=21)
    for spans, prefix in (
        ([first], True),
        ([first, second], True),
        ([first, behind_gap], False),
        ([replace(first, dst=1)], False),
        ([first, replace(second, exact=False)], False),
    ):
        plan = make_plan(spans, 100, OPTIONS)
        assert plan is not None and plan.is_exact_prompt_prefix is prefix
