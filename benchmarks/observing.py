"""What it costs to be observed: metrics, totals and spans of one request, by a clock in the process.

counted     the scheduler's side counts a request that ended, and hands the counts over
observed    the server's side enters them into the metrics that `/metrics` shows
outcome     the server's side takes the report out of the answer, and counts it for `Engine.stats`
traced      a request's span and those of its parts, with vLLM's exporter behind them
kept        for the console, with a token map of a prompt of 4,096 tokens; nothing without it

    python benchmarks/observing.py [--requests 2000]

Writes build/bench/observing.json. Half a minute on one core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import Counter, Gauge, Histogram

from semkv_rag.connector.metrics import ReuseMetrics, ReuseStats
from semkv_rag.engine.outcome import Outcome
from semkv_rag.engine.recent import RecentRequests
from semkv_rag.engine.totals import Totals
from semkv_rag.engine.tracing import RequestTrace
from semkv_rag.report import ReuseReport
from semkv_rag.token_map import MappedSpan, TokenMap
from semkv_rag.wire import COUNTED_KEY, PARAMS_KEY, TIMES_KEY
from workbench.figures import save, summary

TOKENS = 4096
CHUNKS = 8
REPORT = ReuseReport(
    kv_cache="hit",
    prompt_tokens=TOKENS,
    exact_tokens=512,
    reused_tokens=3500,
    recomputed_tokens=600,
    ratio=0.17,
    risk=0.02,
    selector="sensitivity_attention",
    chunk_ids=("a" * 64,) * CHUNKS,
    codecs=("plain",),
    match_ms=2.0,
    load_ms=60.0,
    blend_ms=400.0,
    file_bytes=100 << 20,
    object_bytes=100 << 20,
)
LONG = 512
MAP = TokenMap(
    (),
    0,
    tuple(
        MappedSpan(
            at,
            at + LONG,
            False,
            "a" * 64,
            tuple((begin, begin + 9) for begin in range(at, at + 450, 50)),
            "0123456789" * 51 + "00",
        )
        for at in range(0, TOKENS, LONG)
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    arguments = parser.parse_args()
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    trace.set_tracer_provider(provider)
    stats = ReuseStats()
    config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace())
    shown = ReuseMetrics(
        config,
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["model", "0"]},
    )
    totals, recent = Totals(), RecentRequests()
    tokens = list(range(TOKENS))
    counted: dict[str, Any] = {
        "loaded_tokens": 3412,
        "fault": None,
        "plain_reason": None,
        "seconds": {"pick": 0.2, "recompute": 1.4},
        "stalls_s": [0.02] * 5,
    }
    now = time.time()
    times = dict.fromkeys(("match", "load", "pick", "recompute"), (now, now + 1))

    def answer(report: ReuseReport) -> Any:
        params = {PARAMS_KEY: report.to_mapping(), COUNTED_KEY: counted, TIMES_KEY: times}
        return SimpleNamespace(kv_transfer_params=params, prompt_token_ids=tokens)

    def count() -> None:
        stats.count(REPORT, **counted)
        taken.append(stats.take().data)

    taken: list[Any] = []
    parts: dict[str, Callable[[Any], None]] = {
        "counted": lambda _: count(),
        "observed": lambda _: shown.observe(taken.pop()),
        "outcome": lambda output: Outcome("a", totals, None, None).take(output),
        "traced": lambda output: traced(output),
        "kept": lambda output: Outcome("a", totals, recent, None).take(output),
    }

    def traced(output: Any) -> None:
        span = RequestTrace(None, "model")
        span.headers()
        outcome = Outcome("a", None, None, span)
        outcome.take(output)
        outcome.end()

    mapped = replace(REPORT, token_map=MAP)
    figures: dict[str, Any] = {"requests": arguments.requests, "prompt_tokens": TOKENS}
    took: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(arguments.requests):
        for name, part in parts.items():
            output = answer(mapped if name == "kept" else REPORT)
            began = time.perf_counter()
            part(output)
            took[name].append((time.perf_counter() - began) * 1000)
    figures["parts_ms"] = {name: summary(values) for name, values in took.items()}
    alone = ("counted", "observed", "outcome", "traced")
    figures["metrics_and_traces_ms"] = round(
        sum(figures["parts_ms"][name]["median"] for name in alone), 4
    )
    path = save("observing", figures)
    for name, told in figures["parts_ms"].items():
        print(f"{name:10} {told['median']:.4f} ms")
    print(f"metrics and traces together {figures['metrics_and_traces_ms']:.4f} ms a request")
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
