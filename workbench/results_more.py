"""Tables of docs/results.md with one row for each thing measured: plans, Ray, codecs, metrics, checks."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

PARTS = {
    "counted": "counting it, in the scheduler",
    "observed": "entering it into `/metrics`",
    "outcome": "taking its report, and `Engine.stats`",
    "traced": "its spans",
    "kept": "keeping it for the console, with a token map",
}


def plan_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each figure of a plan: what was planned, and what was measured then."""
    lines = [["", "planned", "measured", "planned / measured"], ["---"] * 4]
    for row in figures["rows"]:
        both = [f"{row[name]:,.1f}" for name in ("planned", "measured")]
        lines.append([row["what"], *both, f"{row['planned'] / row['measured']:.2f}"])
    return lines


def ray_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each kind of time, of both ways: medians, and their ratios in pairs."""
    pairs = figures["pairs"]
    lines = [["seconds", "one engine", "two on Ray", "Ray / one, in pairs"], ["---"] * 4]
    for title, key in (
        ("splitting and computing", "computing_seconds"),
        ("with the start", "seconds"),
    ):
        ratios = [pair["ray"][key] / pair["one"][key] for pair in pairs]
        ways = [f"{median(pair[way][key] for pair in pairs):.1f}" for way in ("one", "ray")]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append([title, *ways, spread])
    return lines


def codec_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each codec."""
    head = [
        *("codec", "bytes a token", "smaller", "8B: smaller"),
        *(
            "error of K, V (mean over layers)",
            "equal tokens",
            "score, from `plain`'s",
            "encode, GB/s",
            "decode, GB/s",
        ),
    ]
    lines = [head, ["---"] * len(head)]
    plain = figures["codecs"]["plain"]["bytes_per_token"]
    for name, told in figures["codecs"].items():
        speed = told["speed"]["8B"]
        encode = speed["encode_gb_per_s"]
        shift, low, high = told["from_plain"]
        apart = [] if name == "plain" else [f"{shift:+.1f} ({low:+.1f} to {high:+.1f})"]
        errors = [sum(told["error"][which]) / len(told["error"][which]) for which in "kv"]
        lines.append(
            [
                f"`{name}`",
                f"{told['bytes_per_token']['the model']:,.0f}",
                *(f"{plain[of] / told['bytes_per_token'][of]:.2f}x" for of in ("the model", "8B")),
                ", ".join(f"{one:.4f}" for one in errors),
                f"{100 * told['agreement']:.1f} %",
                ", ".join([f"{told['score']:.1f}", *apart]),
                "" if encode is None else f"{encode['median']:.1f}",
                f"{speed['decode_gb_per_s']['median']:.1f}",
            ]
        )
    return lines


def observing_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each part of being observed."""
    lines = [["a request's", "ms"], ["---"] * 2]
    for name, told in figures["parts_ms"].items():
        lines.append([PARTS[name], f"{told['median']:.3f}"])
    lines.append(["metrics and spans together", f"{figures['metrics_and_traces_ms']:.3f}"])
    return lines


ERRORS = ("largest_error", "largest_difference_nats")


def doctor_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each check that compares numbers, a column for each engine: how far off it was."""
    runs = figures["runs"]
    found = {
        (one["check"], one["case"]): []
        for one in next(iter(runs.values()))["results"]
        if any(name in one["figures"] for name in ERRORS)
    }
    for run in runs.values():
        for one in run["results"]:
            if (row := found.get((one["check"], one["case"]))) is not None:
                error = next(one["figures"][name] for name in ERRORS if name in one["figures"])
                row.append(f"{error:.2g}" if one["status"] == "ok" else one["status"])
    lines = [["check", *runs], ["---"] * (1 + len(runs))]
    return lines + [[f"{check}, {case}", *row] for (check, case), row in found.items()]
