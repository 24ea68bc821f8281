"""The study's tables, from contexts to Markdown."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.quality_real.report import summary
from workbench.results_study import BASE, side_by_side, study_tables

OURS = "left: sensitivity_attention, 15 %"
THEIRS = "head: kv_deviation_published, 15 %"


def _row(
    context: int, family: str, full: float, **ways: tuple[float, float, float]
) -> dict[str, Any]:
    """A context of which some ways have a KL, equal tokens and a score."""
    names = {"plain": BASE, "ours": OURS, "theirs": THEIRS}
    return {
        "context": context,
        "family": family,
        "order": "retrieved",
        "tokens": 500 + context,
        "full": full,
        "bare": 0.0,
        "ways": {
            names[name]: {"kl": kl, "equal": equal, "score": score, "same": False, "charged": 0.15}
            for name, (kl, equal, score) in ways.items()
        },
    }


ROWS = [
    _row(0, "one fact", 1.0, plain=(0.2, 0.9, 0.0), ours=(0.02, 1.0, 1.0)),
    _row(1, "one fact", 1.0, plain=(0.1, 0.9, 1.0), ours=(0.13, 0.8, 0.0), theirs=(0.1, 0.9, 1.0)),
    _row(2, "variable tracking", 0.1, plain=(0.1, 0.9, 0.1), ours=(0.01, 1.0, 0.1)),
]


def test_scores_are_of_the_families_that_the_model_can_do() -> None:
    found = summary(ROWS)
    assert found["families"] == {"one fact": 2}
    assert found["scores"]["full"] == {"one fact": 1.0}
    assert found["scores"][OURS] == {"one fact": 0.5}
    ours = next(line for line in found["ways"] if line["way"] == OURS)
    assert ours["score_kept"][0] == 0.5
    assert ours["kl"][0] == pytest.approx(0.16 / 3, abs=1e-4)
    assert ours["given_back_median"][0] == 0.9  # of 90, -30 and 90 %
    assert ours["worse_than_plain_reuse"] == 0.333


def test_a_row_for_each_way_and_for_the_score_by_family() -> None:
    ways, scores = study_tables(summary(ROWS)).split("\n\n")
    assert [line.split(" | ")[0] for line in ways.splitlines()[2:]] == [
        "| plain reuse: behind the prompt prefix, nothing computed",
        "| behind the document, `sensitivity_attention`, 15 %",
        "| CacheBlend as published, 15 % (1 contexts that it is possible in)",
    ]
    assert "| 15.0 | 0.0533 [0.0100, 0.1300] |" in ways
    assert scores.splitlines() == [
        "| score % (contexts) | one fact (2) |",
        "| --- | --- |",
        "| full prefill | 100 |",
        "| no passages | 0 |",
        "| plain reuse: behind the prompt prefix, nothing computed | 50 |",
        "| behind the document, `sensitivity_attention`, 15 % | 50 |",
        "| CacheBlend as published, 15 % | 100 |",
    ]


def test_a_column_for_each_group_of_contexts() -> None:
    short, long = summary(ROWS[:1]), summary(ROWS[1:2])
    lines = side_by_side({"short": short, "long": long}).splitlines()
    assert lines[0] == "| charged %: KL, nats a token; equal tokens % | short | long |"
    assert lines[-1] == ("| CacheBlend as published, 15 % | - | 15.0: 0.100 [0.100, 0.100]; 90.0 |")
