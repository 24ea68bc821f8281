"""The table's plots: what an answer costs, by model, and by what a chunk was computed behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_SHOWN = {
    "two_hop_attention": "tab:red",
    "query_attention": "tab:orange",
    "deviation_weighted_attention@1": "tab:olive",
    "deviation_x_attention@3": "tab:purple",
    "deviation_x_attention@2": "tab:pink",
    "plain_attention": "tab:green",
    "kv_deviation@2": "tab:cyan",
    "kv_deviation_published@1": "tab:blue",
    "k_deviation_published@1": "tab:gray",
    "random": "black",
}
"""Selectors and their colours."""
Figures = Mapping[str, Mapping[str, Any]]


def frontier(models: Figures) -> Callable[[Any], None]:
    """Right answers by charged ratio, one panel for each model; chunks computed alone."""

    def plot(figure: Any) -> None:
        axes = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axis, (name, told) in zip(axes, models.items(), strict=True):
            _panel(axis, told["ways"], "alone")
            axis.set_title(name, fontsize=10)
        axes[0].set_ylabel("cross questions right, %")
        _legend(figure, axes[0])

    return plot


def modes(models: Figures) -> Callable[[Any], None]:
    """The same of the first model, one panel for each context at precompute time."""

    def plot(figure: Any) -> None:
        name, told = next(iter(models.items()))
        found = [
            m for m in ("alone", "left", "similar", "document") if f"{m} nothing" in told["ways"]
        ]
        axes = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
        for axis, mode in zip(axes, found, strict=True):
            _panel(axis, told["ways"], mode)
            axis.set_title(f"{mode} ({name})", fontsize=10)
        axes[0].set_ylabel("cross questions right, %")
        _legend(figure, axes[0])

    return plot


def _panel(axis: Any, ways: Mapping[str, Mapping[str, Any]], mode: str) -> None:
    for selector, colour in _SHOWN.items():
        points = sorted(
            (told["charged"], told["cross"], told["cross interval"])
            for way, told in ways.items()
            if way.startswith(f"{mode} {selector} 32 ") and "charged" in told
        )
        if points:
            x, y, spans = zip(*points, strict=True)
            axis.plot(x, y, marker=".", color=colour, label=selector, linewidth=1.2)
            low, high = zip(*spans, strict=True)
            axis.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
    axis.axhline(ways["full"]["cross"], color="black", linestyle=":", linewidth=1)
    axis.axhline(ways[f"{mode} nothing"]["cross"], color="black", linestyle="--", linewidth=0.6)
    axis.set_xlabel("charged, % of full prefill", fontsize=8)
    axis.set_xlim(0, 50)
    axis.set_ylim(0, 101)


def _legend(figure: Any, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
