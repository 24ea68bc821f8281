"""What the contexts' outcomes come to: one line a way, with 95 % intervals by drawing contexts anew.

    python -m benchmarks.quality_real.report build/bench/quality_real_smollm2.json [MORE] [--plot FILE]

prints the tables in Markdown, of all files together; with `--beside`, one short table in which each file
has its own column. `--summary docs/results/study-NAME.json` keeps what the tables of docs/quality-real.md
are made from.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workbench.results_study import BASE, side_by_side, study_tables, told

DRAWS = 2000
ABLE = 0.2
"""A family counts where full prefill is so much above no passages."""
RIVALS = ("head: kv_deviation_published, 15 %", "head: k_deviation_published, 15 %")
"""What others have published, at equal charge."""
OURS = "left: sensitivity_attention, 15 %"
ABOUT = (
    "measured_at",
    "machine",
    "model",
    "dtype",
    "passages",
    "tokens",
    "seed",
    "set",
    "shared",
    "overlap",
    "chunks_before",
    "long_question",
    "question_tokens",
)
"""What a summary says of how it was measured."""

Row = dict[str, Any]


def able_families(rows: Sequence[Row]) -> list[str]:
    """The families that the model can do by full prefill and cannot do without the passages."""
    names = dict.fromkeys(row["family"] for row in rows)
    return [
        name
        for name in names
        if np.mean([row["full"] - row["bare"] for row in rows if row["family"] == name]) >= ABLE
    ]


def table(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Lines for all contexts, and for each family and order."""
    groups = {"all": list(rows)}
    for field in ("family", "order"):
        for name in dict.fromkeys(row[field] for row in rows):
            groups[name] = [row for row in rows if row[field] == name]
    return {name: [_line(group, way) for way in _ways(group)] for name, group in groups.items()}


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """What the tables are made from: how many contexts, each way's line, and its score by family.

    Scores are of the families that the model can do by full prefill and cannot do without the passages.
    """
    able = able_families(rows)
    groups = {name: [row for row in rows if row["family"] == name] for name in able}
    scores = {
        "full": {name: _mean([row["full"] for row in some]) for name, some in groups.items()},
        "bare": {name: _mean([row["bare"] for row in some]) for name, some in groups.items()},
    }
    for way in _ways(rows):
        having = {name: [r for r in some if way in r["ways"]] for name, some in groups.items()}
        scores[way] = {
            name: _mean(_each(some, way, "score")) for name, some in having.items() if some
        }
    return {
        "contexts": len({row["context"] for row in rows}),
        "answers": len(rows),
        "prompt_tokens_median": int(np.median([row["tokens"] for row in rows])),
        "ways": [_line(rows, way) for way in _ways(rows)],
        "families": {name: len(some) for name, some in groups.items()},
        "scores": scores,
    }


def right_answers(rows: Sequence[Row]) -> str:
    """How many answers are right where one thing is asked for, and which full prefill has otherwise."""
    some = [row for row in rows if len(row["wanted"]) == 1]
    lines = [
        f"| | right of {len(some)} | right where full prefill is wrong | wrong where it is right |",
        "|---|---|---|---|",
        f"| full prefill | {sum(row['full'] == 1 for row in some)} | | |",
    ]
    for way in _ways(some):
        asked = [row for row in some if way in row["ways"]]
        pairs = [(row["full"] == 1, row["ways"][way]["score"] == 1) for row in asked]
        of = "" if len(asked) == len(some) else f" (of {len(asked)})"
        lines.append(
            f"| {told(way)}{of} | {sum(mine for _, mine in pairs)} "
            f"| {sum(mine and not full for full, mine in pairs)} "
            f"| {sum(full and not mine for full, mine in pairs)} |"
        )
    return "\n".join(lines)


def against(rows: Sequence[Row], ours: str, theirs: str) -> dict[str, list[float]]:
    """One way less another on the same contexts: KL, equal tokens and score, with intervals."""
    both = [row for row in rows if ours in row["ways"] and theirs in row["ways"]]

    def less(field: str) -> list[float]:
        return interval(
            both,
            lambda some: np.mean(_each(some, ours, field)) - np.mean(_each(some, theirs, field)),
        )

    return {field: less(field) for field in ("kl", "equal", "score")}


def risks(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Every blend's expected loss and the loss that came of it, the lower expectation first."""
    pairs = [
        (float(way["risk"]["loss"]), float(way["kl"]))
        for row in rows
        for way in row["ways"].values()
        if "loss" in way["risk"]
    ]
    return sorted(pairs)


def reliability(rows: Sequence[Row], bins: int = 6) -> str:
    """The table of expected and observed losses, as many blends in each line."""
    lines = ["| expected loss | blends | mean expected | mean KL |", "|---|---|---|---|"]
    for part in np.array_split(np.array(risks(rows)), bins):
        drawn = interval(
            [{"kl": kl} for _, kl in part], lambda some: np.mean([r["kl"] for r in some])
        )
        lines.append(
            f"| {part[0][0]:.4f} to {part[-1][0]:.4f} | {len(part)} | {part[:, 0].mean():.4f} "
            f"| {drawn[0]:.4f} [{drawn[1]:.4f}, {drawn[2]:.4f}] |"
        )
    return "\n".join(lines)


def expectations(rows: Sequence[Row]) -> str:
    """The table of expected and observed means, of each way that estimates its loss."""
    lines = ["| | blends (contexts) | mean expected | mean KL |", "|---|---|---|---|"]
    for way in _ways(rows):
        having = [row for row in rows if way in row["ways"]]
        seen = [row for row in having if "loss" in row["ways"][way]["risk"]]
        if seen:
            contexts = len({row["context"] for row in seen})
            expected = np.mean([row["ways"][way]["risk"]["loss"] for row in seen])
            kl = interval(seen, partial(_mean_kl, way))
            lines.append(
                f"| {told(way)} | {len(seen)} ({contexts}) | {expected:.4f} "
                f"| {kl[0]:.4f} [{kl[1]:.4f}, {kl[2]:.4f}] |"
            )
    return "\n".join(lines)


def _ways(rows: Sequence[Row]) -> list[str]:
    """In their order where most were possible, then those that were not possible there."""
    most = max(rows, key=lambda row: len(row["ways"]))
    return list(dict.fromkeys(way for row in (most, *rows) for way in row["ways"]))


def _line(rows: Sequence[Row], way: str) -> dict[str, Any]:
    having = [row for row in rows if way in row["ways"]]
    able = set(able_families(rows))
    scored = [row for row in having if row["family"] in able]
    given = [row for row in having if row["ways"][BASE]["kl"] > 0.002]
    return {
        "way": way,
        "contexts": len(having),
        "charged": round(float(np.mean(_each(having, way, "charged"))), 3),
        "kl_mean": round(float(np.mean(_each(having, way, "kl"))), 4),
        "kl": interval(having, lambda some: np.mean(_each(some, way, "kl"))),
        "kl_median": round(float(np.median(_each(having, way, "kl"))), 4),
        "equal_tokens": interval(having, lambda some: np.mean(_each(some, way, "equal"))),
        "whole_answers": round(float(np.mean(_each(having, way, "same"))), 3),
        "score_kept": interval(
            scored,
            lambda some: (
                np.sum(_each(some, way, "score")) / max(sum(row["full"] for row in some), 1e-9)
            ),
        ),
        "given_back_median": interval(given, lambda some: np.median(_given_back(some, way))),
        "worse_than_plain_reuse": round(
            float(np.mean([_worse(row, way) for row in having])),
            3,
        ),
    }


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def _each(rows: Sequence[Row], way: str, field: str) -> list[float]:
    return [float(row["ways"][way][field]) for row in rows]


def _mean_kl(way: str, rows: Sequence[Row]) -> float:
    return float(np.mean(_each(rows, way, "kl")))


def _given_back(rows: Sequence[Row], way: str) -> list[float]:
    return [1 - row["ways"][way]["kl"] / row["ways"][BASE]["kl"] for row in rows]


def _worse(row: Row, way: str) -> bool:
    """Worse than plain reuse, by more than full prefill differs from itself."""
    return bool(row["ways"][way]["kl"] > row["ways"][BASE]["kl"] + 0.002)


def interval(rows: Sequence[Row], of: Callable[[Sequence[Row]], Any]) -> list[float]:
    """The value and its 95 % interval: contexts drawn anew, each with all questions on it."""
    if not rows:
        return []
    contexts: dict[Any, list[Row]] = {}
    for number, row in enumerate(rows):
        contexts.setdefault(row.get("context", number), []).append(row)
    groups = list(contexts.values())
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        some = [groups[i] for i in rng.integers(len(groups), size=len(groups))]
        drawn.append(of([row for group in some for row in group]))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return [round(float(value), 4) for value in (of(rows), low, high)]


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """KL and kept score by charge; of the presets, how the expected loss holds."""
    if pairs := risks(rows):
        axis = figure.subplots()
        expected, lost = np.array(pairs).T
        axis.loglog(expected + 1e-5, lost + 1e-5, ".", alpha=0.3, label="a blend")
        parts = np.array_split(np.array(pairs), 8)
        means = np.array([part.mean(0) for part in parts])
        axis.loglog(*means.T, marker="o", label="mean of an eighth")
        axis.loglog([1e-4, 1], [1e-4, 1], color="grey", lw=1, label="as expected")
        axis.set(xlabel="expected loss, nats a token", ylabel="KL from full prefill, nats a token")
        axis.legend()
        return
    axes = figure.subplots(1, 2)
    lines: dict[str, list[dict[str, Any]]] = {}
    for line in table(rows)["all"]:
        lines.setdefault(re.sub(r", (ratio )?[\d.]+ %$", "", line["way"]), []).append(line)
    for name, some in lines.items():
        some.sort(key=lambda line: line["charged"])
        charged = [100 * line["charged"] for line in some]
        axes[0].plot(charged, [line["kl_mean"] for line in some], marker="o", label=name)
        axes[1].plot(charged, [100 * line["score_kept"][0] for line in some], marker="o")
    axes[0].set(xlabel="charged, % of full prefill", ylabel="mean KL from full prefill, nats")
    axes[1].set(xlabel="charged, % of full prefill", ylabel="score kept, %")
    axes[0].legend(fontsize=6)
    for axis in axes:
        axis.set_xlim(0, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--beside", action="store_true", help="the files in columns")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--summary", type=Path, help="where to keep what the tables are made from")
    parser.add_argument("--title", help="what these contexts are, for a column of a table")
    arguments = parser.parse_args()
    parts = {file.stem.removeprefix("quality_real_"): contexts(file) for file in arguments.files}
    if arguments.beside:
        print(side_by_side({name: summary(rows) for name, rows in parts.items()}))
        return
    every = [row for rows in parts.values() for row in rows]
    found = summary(every)
    if arguments.summary is not None:
        of = json.loads(arguments.files[0].read_text())
        about = {name: of[name] for name in ABOUT}
        kept = {"benchmark": "quality_real", **about, "title": arguments.title, **found}
        arguments.summary.write_text(json.dumps(kept, indent=1) + "\n")
    print(study_tables(found))
    print("\n" + right_answers(every))
    ways = _ways(every)
    for theirs in RIVALS:
        if OURS in ways and theirs in ways:
            print(f"\n{told(OURS)}, less {told(theirs)}: {against(every, OURS, theirs)}")
    if risks(every):
        for part in parts.values():
            print("\n" + expectations(part))
        print("\n" + reliability(every))
    if arguments.plot is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw(figure, every)
        figure.savefig(arguments.plot, dpi=120)


def contexts(file: Path) -> list[Row]:
    """A file's rows, each with a context's name that no other file has."""
    rows: list[Row] = json.loads(file.read_text())["contexts"]
    return [row | {"context": (file.stem, row.get("context", n))} for n, row in enumerate(rows)]


if __name__ == "__main__":
    main()
