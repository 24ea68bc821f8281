"""`semkv stats`: what a running server has answered, from its metrics."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Final

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from semkv_rag.cli import options
from semkv_rag.cli.output import print_json, print_table, size_in_words
from semkv_rag.errors import EngineError

COUNTS: Final = {
    "semkv_requests_total": ("outcome", "requests"),
    "semkv_plain_requests_total": ("reason", "without stored KV"),
    "semkv_prompt_tokens_total": ("kind", "prompt tokens"),
    "semkv_loaded_bytes_total": ("tier", "stored KV loaded"),
    "semkv_faults_total": ("kind", "faults"),
    "semkv_prompt_cache_requests_total": ("tier outcome", "prompt cache"),
    "semkv_captures_total": ("outcome", "captures"),
}
"""Each metric's own labels, and the words for it, by the metric's name."""
STATES: Final = {
    "semkv_servable": "served with reuse",
    "semkv_store_chunks": "stored chunks",
    "semkv_store_bytes": "stored KV",
    "semkv_evicted_total": "evicted",
}
TIMES: Final = {
    "semkv_match_seconds": "finding the chunks",
    "semkv_load_seconds": "loading their KV",
    "semkv_pick_seconds": "picking the tokens",
    "semkv_recompute_seconds": "computing them",
    "semkv_blend_seconds": "the whole blend",
    "semkv_stall_seconds": "added to others' steps",
    "vllm:time_to_first_token_seconds": "time to first token",
}
EVERY_S: Final = 2.0
CLEAR: Final = "\x1b[2J\x1b[H"

Stats = dict[str, Any]
"""A number, or numbers by label, by the metric's name."""


def stats_command(
    url: Annotated[
        str, typer.Option(help="The server, such as http://localhost:8000.")
    ] = "http://localhost:8000",
    key: Annotated[
        str | None,
        typer.Option(help="The operator's key.", envvar="SEMKV_OPERATOR_KEY", show_envvar=True),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every two seconds.")] = False,
    as_json: options.Json = False,
) -> None:
    """Show what a running server has answered: requests, tokens, bytes, faults and times."""
    while True:
        stats = read(url, key)
        if watch and sys.stdout.isatty():
            typer.echo(CLEAR, nl=False)
        if as_json:
            print_json(stats)
        else:
            show(stats)
        if not watch:
            return
        time.sleep(EVERY_S)


def read(url: str, key: str | None) -> Stats:
    """The metrics of a server, by name: a number, or counts by label; of times `count`, `sum`, quantiles.

    Raises:
        EngineError: the server does not answer, or wants another key.
    """
    root = url.rstrip("/").removesuffix("/v1")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{root}/metrics", headers=headers, timeout=10)
    except httpx.HTTPError as error:
        raise EngineError(f"{root} does not answer: {error}") from error
    if answer.status_code in (401, 403):
        raise EngineError(f"{root} wants the operator's key: give --key or SEMKV_OPERATOR_KEY")
    if answer.status_code != 200:
        raise EngineError(f"{root}/metrics answers {answer.status_code}")
    stats: Stats = {}
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            name = sample.name
            if name in COUNTS:
                label = " ".join(sample.labels[one] for one in COUNTS[name][0].split())
                own = stats.setdefault(name, {})
                own[label] = own.get(label, 0) + sample.value
            elif name in STATES:
                stats[name] = sample.value
            elif family.name in TIMES and name.endswith(("_count", "_sum")):
                own = stats.setdefault(family.name, {})
                part = name.rpartition("_")[2]
                own[part] = own.get(part, 0) + sample.value
            elif family.name in TIMES and name.endswith("_bucket"):
                below = buckets.setdefault(family.name, {})
                edge = float(sample.labels["le"])
                below[edge] = below.get(edge, 0) + sample.value
    for name, below in buckets.items():
        for part, share in (("p50", 0.5), ("p95", 0.95)):
            if (value := quantile(below, share)) is not None:
                stats[name][part] = value
    return stats


def quantile(below: dict[float, float], share: float) -> float | None:
    """A quantile out of a histogram's buckets, as Prometheus estimates it; None where it is empty.

    Args:
        below: how many are at most so large, by the bucket's edge; the last one is infinite.
    """
    edges = sorted(below)
    wanted = share * below[edges[-1]]
    if not wanted:
        return None
    lower = counted = 0.0
    for edge in edges:
        if below[edge] >= wanted:
            if edge == float("inf"):
                return lower
            return lower + (edge - lower) * (wanted - counted) / (below[edge] - counted)
        lower, counted = edge, below[edge]
    return lower


def show(stats: Stats) -> None:
    rows: list[tuple[Any, ...]] = []
    for name, (_, told) in COUNTS.items():
        own = stats.get(name, {})
        total = sum(own.values())
        for label, count in sorted(own.items()):
            amount = size_in_words(count) if "bytes" in name else f"{count:,.0f}"
            rows.append((told, label, amount, f"{count / total:.0%}" if total else ""))
    for name, told in STATES.items():
        if (value := stats.get(name)) is not None:
            rows.append(
                (told, "", size_in_words(value) if "bytes" in name else f"{value:,.0f}", "")
            )
    print_table(("what", "of them", "so far", "share"), rows)
    times = [
        (told, f"{took['count']:,.0f}", _ms(took.get("p50")), _ms(took.get("p95")))
        for name, told in TIMES.items()
        if (took := stats.get(name, {})).get("count")
    ]
    if times:
        typer.echo()
        print_table(("time", "requests", "median, ms", "p95, ms"), times)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.1f}"
