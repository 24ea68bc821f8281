"""The dashboard's panels: their queries answered by Prometheus, and a drawing of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.dashboard.prometheus import COMPOSE, SCRAPE_S, Prometheus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = COMPOSE / "grafana" / "semkv.json"
WINDOW_S = 15 * SCRAPE_S
"""Stands for `$__rate_interval`, which Grafana makes at least four scrapes long."""
COLUMNS = 24
WIDTH_IN, ROW_IN = 14.0, 0.4
COLOURS = ("#3a7dbd", "#e08b2f", "#4a9d5b", "#b8474a", "#7d62b5", "#8a8a94")


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        place: x, y, width and height in Grafana's grid of 24 columns.
        queries: PromQL and the legend of each, as the dashboard has them.
    """

    title: str
    kind: str
    unit: str
    place: tuple[int, int, int, int]
    stacked: bool
    queries: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Curve:
    """What a panel shows: a name, times in seconds since the run began, and values."""

    name: str
    times: list[float]
    values: list[float]

    def last(self) -> float:
        """The last value that is a number; NaN where none is."""
        return next((one for one in reversed(self.values) if math.isfinite(one)), math.nan)


def panels() -> Iterator[Panel]:
    """The dashboard's."""
    for told in json.loads(FILE.read_text())["panels"]:
        defaults, place = told["fieldConfig"]["defaults"], told["gridPos"]
        yield Panel(
            told["title"],
            told["type"],
            defaults["unit"],
            (place["x"], place["y"], place["w"], place["h"]),
            defaults["custom"].get("stacking", {}).get("mode") == "normal",
            tuple((one["expr"], one["legendFormat"]) for one in told["targets"]),
        )


def filled(query: str) -> str:
    """A query as Grafana sends it: all models, and `WINDOW_S`."""
    query = query.replace("$model", ".*").replace("$__rate_interval", f"{WINDOW_S}s")
    assert "$" not in query, query
    return query


def curves(panel: Panel, prometheus: Prometheus, begin: float, end: float) -> list[Curve]:
    """What a panel shows from `begin` to `end`.

    Raises:
        QueryError: one of its queries is no PromQL.
    """
    return [
        Curve(named(legend, one.labels), [at - begin for at in one.times], one.values)
        for query, legend in panel.queries
        for one in prometheus.range(filled(query), begin, end, max(1.0, (end - begin) / 240))
    ]


def named(legend: str, labels: dict[str, str]) -> str:
    """A series' name by Grafana's `{{label}}`."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def told(value: float, unit: str) -> str:
    """A value in the unit of its panel."""
    if not math.isfinite(value):
        return "–"
    match unit:
        case "percentunit":
            return f"{value:.0%}"
        case "s":
            return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
        case "bytes" | "Bps":
            step = min(4, int(math.log10(value) // 3)) if value >= 1 else 0
            scaled = f"{value / 1000**step:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[step]}"
            return scaled + ("/s" if unit == "Bps" else "")
        case "reqps" | "cps":
            return f"{value:.3g}/s"
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def draw(shown: Sequence[tuple[Panel, list[Curve]]], seconds: float, path: Path) -> None:
    """The panels at their places, as a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = max(panel.place[1] + panel.place[3] for panel, _ in shown)
    size = (WIDTH_IN, rows * ROW_IN)
    figure = plt.figure(figsize=size, facecolor="#f4f5f8")
    for panel, own in shown:
        axes = figure.add_axes(_rectangle(panel, size))
        axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold")
        for side in axes.spines.values():
            side.set_color("#d5d5de")
        if panel.kind == "stat":
            _draw_stat(axes, panel, own)
        else:
            _draw_series(axes, panel, own, seconds)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _rectangle(panel: Panel, size: tuple[float, float]) -> tuple[float, float, float, float]:
    """A panel's axes: left, bottom, width and height as shares of a picture of this size, in inches."""
    x, width = (panel.place[one] * WIDTH_IN / COLUMNS for one in (0, 2))
    y, height = (panel.place[one] * ROW_IN for one in (1, 3))
    before = 0.15 if panel.kind == "stat" else 0.7
    below = 0.1 if panel.kind == "stat" else 0.3
    left, wide = x + before, width - before - 0.15
    bottom, high = size[1] - y - height + below, height - below - 0.35
    return left / size[0], bottom / size[1], wide / size[0], high / size[1]


def _draw_stat(axes: Axes, panel: Panel, own: Sequence[Curve]) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    text = told(own[0].last(), panel.unit) if own else "no data"
    axes.text(0.5, 0.45, text, fontsize=24, ha="center", va="center", transform=axes.transAxes)


def _draw_series(axes: Axes, panel: Panel, own: Sequence[Curve], seconds: float) -> None:
    from matplotlib.ticker import MultipleLocator

    places: dict[str, Any] = {"fontsize": 9, "ncols": 3, "frameon": False, "loc": "upper left"}
    if panel.stacked and own:
        times = sorted({at for one in own for at in one.times})
        values = [dict(zip(one.times, one.values, strict=True)) for one in own]
        heights = [[_number(one.get(at, 0.0)) for at in times] for one in values]
        names = [one.name for one in own]
        axes.stackplot(times, heights, labels=names, colors=COLOURS, alpha=0.75)
    else:
        for one, colour in zip(own, COLOURS * 3, strict=False):
            axes.plot(one.times, one.values, label=one.name, color=colour, linewidth=1.4)
    if own:
        axes.legend(**places)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)
    axes.set_xlim(0, seconds)
    top = max((v for one in own for v in one.values if math.isfinite(v)), default=0.0)
    axes.set_ylim(0, axes.get_ylim()[1] * 1.3 if top else 1)
    axes.yaxis.set_major_formatter(lambda value, _: told(value, panel.unit))
    axes.xaxis.set_major_locator(MultipleLocator(60))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 60:.0f} min")
    axes.tick_params(labelsize=9, color="#d5d5de")
    axes.grid(color="#e6e6ec", linewidth=0.6)
    axes.set_axisbelow(True)


def _number(value: float) -> float:
    return value if math.isfinite(value) else 0.0
