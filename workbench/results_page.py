"""Writes the tables and the plot of docs/results.md out of the benchmarks' JSON in docs/results.

    python -m workbench.results_page

`benchmarks/ttft.py` writes such a file as build/bench/ttft.json: put it in docs/results and name it on
the page.
What stands between two comments is replaced; all else on the page is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.settings import ROOT

DATA = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
PLOT = ROOT / "docs" / "images" / "ttft.svg"
_GENERATED = re.compile(
    r"(<!-- generated: (\S+\.json) -->\n).*?(<!-- end of generated -->\n)", re.S
)
_PLAIN = {"plain": "plain vLLM", "off": "reuse switched off", "miss": "nothing stored was found"}


def written(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        FileNotFoundError: a file that it names is not in docs/results.
    """
    return _GENERATED.sub(lambda part: part[1] + ttft_table(_read(part[2])) + part[3], page)


def ttft_table(figures: Mapping[str, Any]) -> str:
    """Times to the first token, a row for each method and a column for each length of prompt."""
    lengths = figures["lengths"]
    titles = [f"{one['prompt_tokens']:,} tokens" for one in lengths]
    rows = [
        [_label(name), *(_times(one["methods"][name]) for one in lengths)]
        for name in lengths[0]["methods"]
    ]
    lines = [["ms (least–most)", *titles], ["---"] * (1 + len(titles)), *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"


def draw(axes: Any, title: str, figures: Mapping[str, Any], methods: Sequence[str]) -> None:
    """Medians of some methods by the prompt's length."""
    for name in methods:
        there = [one for one in figures["lengths"] if name in one["methods"]]
        medians = [one["methods"][name]["ttft_ms"]["median"] / 1000 for one in there]
        tokens = [one["prompt_tokens"] for one in there]
        axes.plot(tokens, medians, marker="o", label=_label(name).replace("`", ""))
    axes.set(title=title, xlabel="prompt tokens", ylabel="time to the first token, s")
    axes.set_ylim(bottom=0)
    axes.legend()


def _read(name: str) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((DATA / name).read_text(encoding="utf-8"))
    return figures


def _label(method: str) -> str:
    if method.endswith("%"):
        return f"{method.removesuffix('%')} % recomputed"
    return _PLAIN.get(method, f"`{method}`")


def _times(entry: Mapping[str, Any]) -> str:
    times = entry["ttft_ms"]
    told = f"{times['median']:,.0f} ({times['min']:,.0f}–{times['max']:,.0f})"
    if "speedup" in entry:
        told += f": {entry['speedup']['median']:.1f} times sooner"
    return told + (f", {entry['limit']:.1f} possible" if "limit" in entry else "")


def plot(path: Path) -> None:
    """Both models' times, as an SVG that is the same for the same figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "semkv"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw(left, "SmolLM2-135M", _read("ttft-smollm2.json"), ["plain", "balanced", "fast"])
    draw(
        right, "24 layers, random weights", _read("ttft-random.json"), ["plain", "30%", "15%", "5%"]
    )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    plot(PLOT)
