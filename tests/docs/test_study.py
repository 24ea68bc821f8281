"""The study's tables, out of a summary of its contexts."""

from __future__ import annotations

from typing import Any

from workbench.results_study import BASE, side_by_side, study_tables

OURS = "left: sensitivity_attention, 15 %"
THEIRS = "head: kv_deviation_published, 15 %"


def _line(way: str, contexts: int, kl: float) -> dict[str, Any]:
    return {
        "way": way,
        "contexts": contexts,
        "charged": 0.15,
        "kl": [kl, kl / 2, kl * 2],
        "equal_tokens": [0.9, 0.8, 1.0],
        "score_kept": [0.5, 0.0, 1.0],
        "given_back_median": [0.9, -0.3, 0.9],
        "worse_than_plain_reuse": 0.333,
    }


SUMMARY = {
    "answers": 3,
    "ways": [_line(BASE, 3, 0.2), _line(OURS, 3, 0.04), _line(THEIRS, 1, 0.1)],
    "families": {"one fact": 2, "articles": 1},
    "scores": {
        "full": {"one fact": 1.0, "articles": 1.0},
        "bare": {"one fact": 0.0, "articles": 0.0},
        BASE: {"one fact": 0.5, "articles": 1.0},
        OURS: {"one fact": 1.0, "articles": 0.0},
        THEIRS: {"articles": 1.0},
    },
}


def test_a_row_for_each_way_and_for_the_score_by_family() -> None:
    ways, scores = study_tables(SUMMARY).split("\n\n")
    kept = "90.0 [80.0, 100.0] | 50.0 [0.0, 100.0]"
    assert ways.splitlines()[2:] == [
        "| plain reuse: behind the prompt prefix, nothing computed "
        f"| 15.0 | 0.2000 [0.1000, 0.4000] | {kept} |  |  |",
        "| behind the document, `sensitivity_attention`, 15 % "
        f"| 15.0 | 0.0400 [0.0200, 0.0800] | {kept} | 90.0 [-30.0, 90.0] | 33 |",
        "| CacheBlend as published, 15 % (1 contexts that it is possible in) "
        f"| 15.0 | 0.1000 [0.0500, 0.2000] | {kept} | 90.0 [-30.0, 90.0] | 33 |",
    ]
    assert scores.splitlines() == [
        "| score % (contexts) | one fact (2) | articles (1) |",
        "| --- | --- | --- |",
        "| full prefill | 100 | 100 |",
        "| no passages | 0 | 0 |",
        "| plain reuse: behind the prompt prefix, nothing computed | 50 | 100 |",
        "| behind the document, `sensitivity_attention`, 15 % | 100 | 0 |",
        "| CacheBlend as published, 15 % | - | 100 |",
    ]


def test_no_second_table_where_the_model_can_do_no_family() -> None:
    assert "\n\n" not in study_tables({**SUMMARY, "families": {}})


def test_a_column_for_each_group_of_contexts() -> None:
    short = {**SUMMARY, "ways": SUMMARY["ways"][:2]}
    lines = side_by_side({"short": short, "long": SUMMARY}).splitlines()
    assert lines[0] == "| charged %: KL, nats a token; equal tokens % | short | long |"
    assert lines[-1] == "| CacheBlend as published, 15 % | - | 15.0: 0.100 [0.050, 0.200]; 90.0 |"
