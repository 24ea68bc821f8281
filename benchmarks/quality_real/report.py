"""What the contexts' outcomes come to: one line a way, with 95 % intervals by drawing contexts anew.

    python -m benchmarks.quality_real.report build/bench/quality_real_smollm2.json [MORE] [--plot FILE]

prints the tables in Markdown, of all files together.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DRAWS = 2000
ABLE = 0.2
"""A family counts where full prefill is so much above no passages."""
BASE = "head: as stored"
"""Plain reuse. In the names of ways, which are keys of the files, `head` is the prompt prefix."""

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


def markdown(rows: Sequence[Row]) -> str:
    """The tables of docs/quality-real.md: all contexts, and the kept score by family."""
    able = able_families(rows)
    lines = [
        "| way | charged % | KL, mean / median | equal tokens % | whole answers % | score kept %"
        " | loss given back, median % | worse than plain reuse % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in table(rows)["all"]:
        mean, low, high = line["kl"]
        lines.append(
            f"| {line['way']} | {100 * line['charged']:.1f} "
            f"| {mean:.4f} [{low:.4f}, {high:.4f}] / {line['kl_median']:.4f} "
            f"| {_percent(line['equal_tokens'])} | {100 * line['whole_answers']:.0f} "
            f"| {_percent(line['score_kept'])} | {_percent(line['given_back_median'])} "
            f"| {100 * line['worse_than_plain_reuse']:.0f} |"
        )
    ways = _ways(rows)
    lines += ["", "| score % | " + " | ".join(able) + " |", "|---|" + "---|" * len(able)]
    for name in ("full", "bare", *ways):
        cells = []
        for family in able:
            some = [row for row in rows if row["family"] == family]
            scores = [
                row[name] if name in ("full", "bare") else row["ways"][name]["score"]
                for row in some
                if name in ("full", "bare") or name in row["ways"]
            ]
            cells.append(f"{100 * float(np.mean(scores)):.0f}" if scores else "-")
        told = {"full": "full prefill", "bare": "no passages"}.get(name, name)
        lines.append(f"| {told} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def risks(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Every blend's expected loss and the loss that came of it, the lower expectation first."""
    told = [
        (float(way["risk"]["loss"]), float(way["kl"]))
        for row in rows
        for way in row["ways"].values()
        if "loss" in way["risk"]
    ]
    return sorted(told)


def reliability(rows: Sequence[Row], bins: int = 6) -> str:
    """The table of expected and observed losses, as many blends in each line."""
    lines = ["| expected loss | blends | mean expected | mean KL |", "|---|---|---|---|"]
    for part in np.array_split(np.array(risks(rows)), bins):
        drawn = _interval(
            [{"kl": kl} for _, kl in part], lambda some: np.mean([r["kl"] for r in some])
        )
        lines.append(
            f"| {part[0][0]:.4f} to {part[-1][0]:.4f} | {len(part)} | {part[:, 0].mean():.4f} "
            f"| {drawn[0]:.4f} [{drawn[1]:.4f}, {drawn[2]:.4f}] |"
        )
    return "\n".join(lines)


def _percent(interval: Sequence[float]) -> str:
    if not interval:
        return "-"
    value, low, high = (100 * one for one in interval)
    return f"{value:.1f} [{low:.1f}, {high:.1f}]"


def _ways(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(way for row in rows for way in row["ways"]))


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
        "kl": _interval(having, lambda some: np.mean(_each(some, way, "kl"))),
        "kl_median": round(float(np.median(_each(having, way, "kl"))), 4),
        "equal_tokens": _interval(having, lambda some: np.mean(_each(some, way, "equal"))),
        "whole_answers": round(float(np.mean(_each(having, way, "same"))), 3),
        "score_kept": _interval(
            scored,
            lambda some: (
                np.sum(_each(some, way, "score")) / max(sum(row["full"] for row in some), 1e-9)
            ),
        ),
        "given_back_median": _interval(given, lambda some: np.median(_given_back(some, way))),
        "worse_than_plain_reuse": round(
            float(np.mean([_worse(row, way) for row in having])),
            3,
        ),
    }


def _each(rows: Sequence[Row], way: str, field: str) -> list[float]:
    return [float(row["ways"][way][field]) for row in rows]


def _given_back(rows: Sequence[Row], way: str) -> list[float]:
    return [1 - row["ways"][way]["kl"] / row["ways"][BASE]["kl"] for row in rows]


def _worse(row: Row, way: str) -> bool:
    """Worse than plain reuse, by more than full prefill differs from itself."""
    return bool(row["ways"][way]["kl"] > row["ways"][BASE]["kl"] + 0.002)


def _interval(rows: Sequence[Row], of: Callable[[Sequence[Row]], Any]) -> list[float]:
    """The value and its 95 % interval."""
    if not rows:
        return []
    rng = np.random.default_rng(0)
    drawn = [of([rows[i] for i in rng.integers(len(rows), size=len(rows))]) for _ in range(DRAWS)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return [round(float(value), 4) for value in (of(rows), low, high)]


def draw(figure: Any, rows: Sequence[Row]) -> None:
    """KL and kept score by charge; of the presets, how the expected loss holds."""
    if told := risks(rows):
        axis = figure.subplots()
        expected, lost = np.array(told).T
        axis.loglog(expected + 1e-5, lost + 1e-5, ".", alpha=0.3, label="a blend")
        parts = np.array_split(np.array(told), 8)
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
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    every = [row for file in arguments.files for row in json.loads(file.read_text())["contexts"]]
    print(markdown(every))
    if risks(every):
        print("\n" + reliability(every))
    if arguments.plot is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4.5), layout="constrained")
        draw(figure, every)
        figure.savefig(arguments.plot, dpi=120)


if __name__ == "__main__":
    main()
