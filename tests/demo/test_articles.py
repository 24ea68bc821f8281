"""The articles that a real model is asked about: there are enough, and every answer stands in them."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from make_corpus import CORPUS

ARTICLES = CORPUS.parent / "articles"
TEXTS = {
    path.relative_to(ARTICLES).as_posix(): path.read_text(encoding="utf-8")
    for path in ARTICLES.rglob("*.md")
}
QUESTIONS: list[dict[str, Any]] = json.loads((ARTICLES / "questions.json").read_text("utf-8"))


def test_there_are_enough() -> None:
    assert len(TEXTS) >= 60
    assert sum(len(text.split()) for text in TEXTS.values()) >= 75_000
    assert len(QUESTIONS) >= 120
    assert len({one["question"] for one in QUESTIONS}) == len(QUESTIONS)
    kinds = Counter(one["kind"] for one in QUESTIONS)
    assert kinds.keys() == {"one passage", "two passages", "comparison"}
    assert min(kinds.values()) >= 30


@pytest.mark.parametrize("name", TEXTS)
def test_an_article_has_a_title_sections_and_a_question(name: str) -> None:
    text = TEXTS[name]
    assert text.startswith("# ")
    assert 5 <= text.count("\n## ") <= 8
    assert any(name in one["sources"] for one in QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one["question"][:60])
def test_an_answer_stands_in_its_sources(question: dict[str, Any]) -> None:
    told = " ".join(TEXTS[name] for name in question["sources"]).lower()
    assert any(one.lower() in told for one in (question["answer"], *question["also"]))
