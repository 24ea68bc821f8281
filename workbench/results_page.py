"""Writes the tables of docs/results.md and docs/quality-real.md out of the JSON in docs/results.

    python -m workbench.results_page

The programs in `benchmarks/` write such files into build/bench: put them in docs/results and name them on
the page. What stands between two comments is replaced; all else on the pages is written by hand. Names
of several files make one table, with a column for each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.results_more import (
    codec_lines,
    doctor_lines,
    observing_lines,
    plan_lines,
    ray_lines,
)
from workbench.results_study import side_by_side, study_tables
from workbench.settings import ROOT

DATA = ROOT / "docs" / "results"
PAGES = (ROOT / "docs" / "results.md", ROOT / "docs" / "quality-real.md")
PLOT = ROOT / "docs" / "images" / "ttft.svg"
_GENERATED = re.compile(
    r"(<!-- generated: (\S+\.json(?: \S+\.json)*) -->\n).*?(<!-- end of generated -->\n)", re.S
)
_PLAIN = {"plain": "plain vLLM", "off": "reuse switched off", "miss": "nothing stored was found"}


def written(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        FileNotFoundError: a file that it names is not in docs/results.
    """
    return _GENERATED.sub(lambda part: f"{part[1]}\n{_tables(part[2].split())}\n{part[3]}", page)


def _tables(names: Sequence[str]) -> str:
    figures = [_read(name) for name in names]
    if len(figures) > 1:
        return side_by_side({one["title"]: one for one in figures})
    if figures[0]["benchmark"] == "quality_real":
        return study_tables(figures[0])
    return table(figures[0])


def table(figures: Mapping[str, Any]) -> str:
    """What a benchmark found."""
    by_benchmark = {
        "load": load_lines,
        "beside": beside_lines,
        "miss_cost": miss_lines,
        "sustained": sustained_lines,
        "picked_tokens": picked_lines,
        "loading": loading_lines,
        "matcher": matcher_lines,
        "opening": opening_lines,
        "plan": plan_lines,
        "on_ray": ray_lines,
        "codecs": codec_lines,
        "observing": observing_lines,
        "doctor": doctor_lines,
    }
    lines = by_benchmark.get(figures["benchmark"], ttft_lines)(figures)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def matcher_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each kind of prompt, and for what an index weighs; a column for each store."""
    sizes = figures["sizes"]
    lines = [["prompt", *(f"{size['chunks']:,} chunks" for size in sizes)]]
    lines.append(["---"] * len(lines[0]))
    for name in sizes[0]["prompts"]:
        cells = []
        for size in sizes:
            passed, cpu = (size["prompts"][name][key] for key in ("match_ms", "match_cpu_ms"))
            cells.append(f"{passed['median']:.1f} ({cpu['median']:.1f}, least {cpu['min']:.1f})")
        lines.append([name, *cells])
    for label, key in (
        ("memory of a chunk in a file, bytes", "bytes_per_chunk"),
        ("the file, bytes a chunk", "file_bytes_per_chunk"),
        ("memory of a new chunk, bytes", "bytes_per_new_chunk"),
        ("adding a chunk, µs, in batches of 1,000", "add_us_per_chunk"),
        ("writing the file, s", "writing_s"),
    ):
        lines.append([label, *(f"{size[key]:,.4g}" for size in sizes)])
    return lines


def opening_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """What an opening took, without a window file and with one."""
    first, again = figures["first"], figures["again"]
    lines = [["opening", "", ""], ["---"] * 3]
    lines.append(["with the file", "`KVStore`, s", f"{again['store_s']:.2f}"])
    lines.append(["", "`Catalogue.load`, s", f"{again['load_s']:.2f}"])
    lines.append(["", "first look-up, ms", f"{again['first_look_up_ms']:.0f}"])
    lines.append(["", "**until the first plan, s**", f"**{again['until_the_first_plan_s']:.2f}**"])
    lines.append(["", "memory of a chunk, bytes", f"{again['bytes_per_chunk']:.0f}"])
    lines.append(["", "the process grows by, MiB", f"{again['process_memory_more_mib']}"])
    for name, told in again["look_ups"].items():
        passed, cpu = told["ms"], told["cpu_ms"]
        cell = f"{passed['median']:.1f} ({cpu['median']:.1f}, least {cpu['min']:.1f})"
        lines.append(["", f"look-up in the store: {name.replace('_', ' ')}, ms", cell])
    lines.append(["without", "until an engine could start, s", f"{first['until_it_serves_s']:.1f}"])
    written = f"{first['until_the_file_is_written_s']:.0f}"
    lines.append(["", "until all is taken in and the file written, s", written])
    meanwhile = first["look_ups_meanwhile_ms"]
    cell = f"{meanwhile['median']:.0f}, {first['look_ups_meanwhile_p99_ms']:.0f}"
    lines.append(["", "look-ups meanwhile, ms: p50, p99", cell])
    lines.append(["", "the process's peak, MiB", f"{first['peak_process_mib']:,}"])
    lines.append(["", "the file, bytes a chunk", f"{first['file_bytes_per_chunk']:.0f}"])
    return lines


def load_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each load, and way under it."""
    lines = [
        ["load", "", "first token, s: p50, p95, p99", "between tokens, ms: p50, p95", "requests/s"]
    ]
    lines.append(["---"] * 5)
    for row in figures["loads"]:
        load = _clients(row["clients"]) if "clients" in row else f"{row['rate']:g} requests/s come"
        for way, told in row["ways"].items():
            first = ", ".join(f"{ms / 1000:.1f}" for ms in told["ttft_ms"].values())
            between = ", ".join(f"{told['between_tokens_ms'][p]:,.0f}" for p in ("p50", "p95"))
            lines.append([load, _label(way), first, between, f"{told['requests_per_s']:.2f}"])
    return lines


def _clients(count: int) -> str:
    return "1 client" if count == 1 else f"{count} clients"


def beside_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each way."""
    lines = [
        ["long prompt", "its first token, s", "others' gaps, ms: p50, p95, p99", "others' tokens/s"]
    ]
    lines.append(["---"] * 4)
    for way, told in figures["ways"].items():
        first = told["ttft_ms"]
        times = (
            f"{first['median'] / 1000:.1f} ({first['min'] / 1000:.1f}–{first['max'] / 1000:.1f})"
        )
        gaps = ", ".join(f"{ms:,.0f}" for ms in told["gap_ms"].values())
        lines.append([_label(way), times, gaps, f"{told['tokens_of_others_per_s']:.1f}"])
    return lines


def miss_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each length of prompt."""
    lines = [
        ["prompt", "first token, ms", "waiting for the look-up, ms", "the rest of it, ms", "share"]
    ]
    lines.append(["---"] * 5)
    for row in figures["lengths"]:
        share = f"{row['share']:.2%} (at most {row['largest_share']:.2%})"
        times = [f"{row[name]:,.2f}" for name in ("let_in_ms", "connector_ms")]
        lines.append([f"{row['prompt_tokens']:,} tokens", f"{row['ttft_ms']:,.0f}", *times, share])
    return lines


def loading_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each way to load, warm ones first."""
    shapes = ("SmolLM2", "8B")
    titles = [f"{shape}: GB/s, of it" for shape in shapes]
    lines = [["", "six chunks", "compared with", *titles], ["---"] * 5]
    for part in ("warm", "cold"):
        for way, first in figures[shapes[0]][part].items():
            told = [figures[shape][part][way] for shape in shapes]
            own = first["of"] == way
            cells = [
                f"{one['gb_per_s']:.1f}" + ("" if own else f", {one['ratio']['median']:.2f}")
                for one in told
            ]
            lines.append([part, way, "" if own else first["of"], *cells])
    return lines


def picked_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """A row for each length of prompt."""
    lines = [
        [
            "prompt",
            "attention's share: plain, picked",
            "a key, ns: plain, picked",
            "all else of a token, µs: plain, picked",
            "of what the kernels allow",
        ]
    ]
    lines.append(["---"] * 5)
    for row in figures["lengths"]:
        both = row["plain"], row["picked"]
        allowed = row["of_allowed"]
        lines.append(
            [
                f"{row['prompt_tokens']:,} tokens",
                ", ".join(f"{one['attention_share']['median']:.0%}" for one in both),
                ", ".join(f"{one['ns_per_key']['median']:,.0f}" for one in both),
                ", ".join(f"{one['us_per_token_else']['median']:,.0f}" for one in both),
                f"{allowed['median']:.2f} ({allowed['min']:.2f}–{allowed['max']:.2f})",
            ]
        )
    return lines


def sustained_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """The first and the last third of the prompts, a row for each figure."""
    shown = {
        "first token, ms": ("ttft_ms", "{:,.0f}"),
        "first token over that of a short plain prompt beside it": ("ttft_over_plain", "{:.2f}"),
        "tokens that were reused": ("reused_share", "{:.1%}"),
        "memory of all processes, MB": ("memory_bytes", "{:,.0f}"),
    }
    lines = [["median", "first third", "last third", "last over first, 95 %"], ["---"] * 4]
    for title, (name, shape) in shown.items():
        third = figures["thirds"][name]
        unit = 1e6 if name == "memory_bytes" else 1
        times = [shape.format(third[which] / unit) for which in ("first", "last")]
        low, high = third["ratio_95"]
        lines.append([title, *times, f"{third['ratio']:.3f} ({low:.3f}–{high:.3f})"])
    return lines


def ttft_lines(figures: Mapping[str, Any]) -> list[list[str]]:
    """Times to the first token, a row for each method and a column for each length of prompt."""
    lengths = figures["lengths"]
    titles = [f"{one['prompt_tokens']:,} tokens" for one in lengths]
    rows = [
        [_label(name), *(_times(one["methods"].get(name), name) for one in lengths)]
        for name in sorted(lengths[0]["methods"], key=_order)
    ]
    return [["ms (least–most)", *titles], ["---"] * (1 + len(titles)), *rows]


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


def _order(method: str) -> tuple[int, int, str]:
    """Plain vLLM first, then presets, then ratios from the highest."""
    if method.endswith("%"):
        return 2, -int(method.removesuffix("%")), ""
    return (0, list(_PLAIN).index(method), "") if method in _PLAIN else (1, 0, method)


def _times(entry: Mapping[str, Any] | None, method: str) -> str:
    if entry is None:
        return "not measured"
    times = entry["ttft_ms"]
    told = f"{times['median']:,.0f} ({times['min']:,.0f}–{times['max']:,.0f})"
    if "speedup" in entry and method not in _PLAIN:
        told += f": {entry['speedup']['median']:.1f} times sooner"
    return told + (f", {entry['limit']:.1f} possible" if "limit" in entry else "")


def plot(path: Path) -> None:
    """The times on both machines, as an SVG that is the same for the same figures."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "semkv"
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axes, title, name in (
        (left, "without AMX", "ttft-smollm2"),
        (right, "with AMX", "ttft-amx"),
    ):
        draw(
            axes,
            f"SmolLM2-135M, a CPU {title}",
            _read(f"{name}.json"),
            ["plain", "balanced", "fast"],
        )
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    for name in PAGES:
        name.write_text(written(name.read_text(encoding="utf-8")), encoding="utf-8")
    plot(PLOT)
