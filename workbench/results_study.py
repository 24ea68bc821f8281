"""The tables of docs/quality-real.md, out of summaries of `benchmarks.quality_real.report`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Summary = Mapping[str, Any]

BASE = "head: as stored"
"""Plain reuse. In the names of ways, which are keys of the files, `head` is the prompt prefix."""
TOLD = {
    BASE: "plain reuse: behind the prompt prefix, nothing computed",
    "left: as stored": "behind the document, nothing computed",
    "left: chunk_head, 15 %": "the first tokens of each chunk (EPIC, arXiv 2410.15332)",
    "left: first tokens, 15 %": "four first tokens of each chunk in any case, then the default's",
    "left: one layer, 15 %": (
        "the question's attention in one layer, two thirds up"
        " (the critical layer of QCFuse, arXiv 2606.05875)"
    ),
    "left: two stages, 15 %": (
        "two stages: half is computed, the question asked again, then the rest"
        " (as ProphetKV, arXiv 2602.02579, recalls)"
    ),
    "left: stale keys x 0.95, 15 %": (
        "keys that stay stale made 5 % shorter (temperature, as APE, arXiv 2502.05431)"
    ),
    "left: stale keys x 1.05, 15 %": "5 % longer",
    "fast": "`fast`",
    "fast, auto": '`fast`, `ratio="auto"`',
    "balanced": "`balanced`",
    "balanced, auto": '`balanced`, `ratio="auto"`',
    "exact": "`exact`",
}


def told(way: str) -> str:
    """A way's name as the documentation has it."""
    if way in TOLD:
        return TOLD[way]
    name = way.replace("kv_deviation_published", "CacheBlend as published")
    name = name.replace("k_deviation_published", "LMCache's rule").removeprefix("head: ")
    name = name.replace("left only: ", "the prompt's first chunk behind the document, too: ")
    name = name.replace("left: ", "behind the document, ").replace(", oracle", ", the oracle")
    return re.sub("(query_attention|sensitivity_attention)", r"`\1`", name)


def study_tables(summary: Summary) -> str:
    """All contexts, a row for each way; and each way's score by family, if the model can do any."""
    lines = [
        [
            "",
            "charged %",
            "KL, nats a token",
            "equal tokens %",
            "score kept %",
            "loss given back, median %",
            "worse than plain reuse %",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    for line in summary["ways"]:
        of = ""
        if line["contexts"] < summary["answers"]:
            of = f" ({line['contexts']} contexts that it is possible in)"
        plain = line["way"] == BASE
        lines.append(
            [
                told(line["way"]) + of,
                f"{100 * line['charged']:.1f}",
                _kl(line["kl"], 4),
                _percent(line["equal_tokens"]),
                _percent(line["score_kept"]),
                "" if plain else _percent(line["given_back_median"]),
                "" if plain else f"{100 * line['worse_than_plain_reuse']:.0f}",
            ]
        )
    families = summary["families"]
    if not families:
        return _markdown(lines)
    scores = [["score % (contexts)", *(f"{name} ({count})" for name, count in families.items())]]
    scores.append(["---"] * len(scores[0]))
    for name, of_family in summary["scores"].items():
        first = {"full": "full prefill", "bare": "no passages"}.get(name) or told(name)
        cells = [f"{100 * of_family[one]:.0f}" if one in of_family else "-" for one in families]
        scores.append([first, *cells])
    return f"{_markdown(lines)}\n{_markdown(scores)}"


def side_by_side(summaries: Mapping[str, Summary]) -> str:
    """Several groups of contexts by their titles, a column for each."""
    ways = dict.fromkeys(line["way"] for one in summaries.values() for line in one["ways"])
    lines = [["charged %: KL, nats a token; equal tokens %", *summaries]]
    lines.append(["---"] * len(lines[0]))
    found = [{line["way"]: line for line in one["ways"]} for one in summaries.values()]
    for way in ways:
        cells = [_cell(of_way[way]) if way in of_way else "-" for of_way in found]
        lines.append([told(way), *cells])
    return _markdown(lines)


def _cell(line: Mapping[str, Any]) -> str:
    equal = f"{100 * line['equal_tokens'][0]:.1f}"
    return f"{100 * line['charged']:.1f}: {_kl(line['kl'], 3)}; {equal}"


def _kl(interval: Sequence[float], digits: int) -> str:
    value, low, high = (f"{one:.{digits}f}" for one in interval)
    return f"{value} [{low}, {high}]"


def _percent(interval: Sequence[float]) -> str:
    if not interval:
        return "-"
    value, low, high = (100 * one for one in interval)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
