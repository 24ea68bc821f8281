"""What became of each token, as values, as HTML, and in a terminal."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from semkv_rag import ReuseReport
from semkv_rag.config import ReuseOptions
from semkv_rag.engine.mapping import texts
from semkv_rag.errors import OptionError
from semkv_rag.reuse import ReusePlan, Span
from semkv_rag.reuse.mapped import token_map
from semkv_rag.token_map import MappedSpan, TokenMap

PIECES = tuple("abcdefghijklmnop")
SHOWN = TokenMap(
    PIECES,
    2,
    (
        MappedSpan(1, 4, True, "a" * 64, source="one.txt", stored_at=0.0),
        MappedSpan(6, 12, False, "b" * 64, ((7, 9), (11, 12)), "091238", "two.txt", 40),
    ),
)
REPORT = ReuseReport(
    kv_cache="hit", prompt_tokens=16, exact_tokens=3, reused_tokens=6, token_map=SHOWN
)


def test_kinds_of_tokens() -> None:
    kinds = SHOWN.kinds()
    assert kinds == [
        *(["cached"] * 2),
        *(["exact"] * 2),
        *(["computed"] * 2),
        *("reused", "recomputed", "recomputed", "reused", "reused", "recomputed"),
        *(["computed"] * 4),
    ]
    assert SHOWN.counts() == {
        "cached": 2, "exact": 2, "computed": 6, "reused": 3, "recomputed": 3
    }  # fmt: skip


def test_parts_are_the_whole_text_in_order() -> None:
    parts = list(SHOWN.parts())
    assert "".join(text for text, *_ in parts) == "".join(PIECES)
    told = [(text, kind, span and span.source, score) for text, kind, span, score in parts]
    assert told[:4] == [
        ("a", "cached", None, ""),
        ("b", "cached", "one.txt", ""),
        ("cd", "exact", "one.txt", ""),
        ("ef", "computed", None, ""),
    ]
    assert ("h", "recomputed", "two.txt", "9") in told
    assert list(TokenMap().parts()) == []


def test_a_report_travels_with_its_map() -> None:
    again = ReuseReport.from_mapping(REPORT.to_mapping())
    assert again == REPORT
    assert ReuseReport.from_mapping(ReuseReport().to_mapping()).token_map is None


def test_html_is_text_and_colours_and_no_script() -> None:
    evil = "<script>alert(1)</script>\"'&"
    span = MappedSpan(0, 1, False, "c" * 64, source=evil)
    report = ReuseReport(
        kv_cache="hit",
        prompt_tokens=2,
        selector=evil,
        reused_tokens=1,
        reason=evil,
        token_map=TokenMap((evil, "x"), 0, (span,)),
    )
    for made in (report.to_html(), report._repr_html_() or ""):
        assert "<script" not in made
        assert made.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;") == 4
    assert report.to_html().startswith("<!doctype html>")
    assert "Content-Security-Policy" in report.to_html()


def test_html_names_counts_and_documents() -> None:
    made = REPORT.to_html()
    for words in ("loaded, computed again: <b>3</b> (19%)", "two.txt", "behind 40 other tokens"):
        assert words in made
    assert (
        '<span class="recomputed" title="loaded, computed again; chunk 2; wanted 9 of 9">h</span>'
        in (made)
    )


def test_without_a_map_there_is_nothing_to_draw() -> None:
    assert ReuseReport()._repr_html_() is None
    with pytest.raises(OptionError, match="ask with token_map=True"):
        ReuseReport().to_html()
    with pytest.raises(OptionError, match="token_map is 1: use true or false"):
        ReuseOptions(token_map=1)  # type: ignore[arg-type]


def test_in_a_terminal() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True, color_system="truecolor")
    console.print(REPORT)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "loaded, exact 2" in said
    assert "two.txt" in said
    plain = Console(file=StringIO(), width=100)
    plain.print(REPORT)
    assert "".join(PIECES) in plain.file.getvalue()  # type: ignore[attr-defined]


def test_the_map_of_a_plan() -> None:
    spans = (Span("a", 0, 0, 4, exact=True), Span("b", 2, 6, 5, base=30))
    plan = ReusePlan(spans, 11, ReuseOptions())
    made = token_map(plan, 0, [(3, 8), (10, 20)], "    " + "  01234", 0)
    assert [(s.begin, s.end, s.exact, s.recomputed, s.scores) for s in made.spans] == [
        (0, 4, True, (), ""),
        (6, 11, False, ((6, 8), (10, 11)), "01234"),
    ]
    assert made.spans[1].context_tokens == 30
    # vLLM's prefix cache had the first of the second chunk: nothing is known of these.
    behind = token_map(plan, 8, [(9, 10)], "234", 8)
    assert (behind.spans[1].recomputed, behind.spans[1].scores) == (((9, 10),), "")
    assert token_map(None, 3) == TokenMap((), 3, ())


class Bytes:
    """A tokenizer of which each token is a byte of UTF-8."""

    def decode(self, tokens: Any, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve café", "雪の町 🙂🙂 x", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", ""])
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    tokens = list(text.encode())
    pieces = texts(tokens, Bytes())
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_tokens_that_are_no_characters_have_a_text_all_the_same() -> None:
    pieces = texts([0xFF] * 9 + [0x61], Bytes())
    assert "".join(pieces).endswith("a")
    assert len(pieces) == 10
