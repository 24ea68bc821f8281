"""Under load: how soon the first token comes and how many requests a second are answered.

Prompts are six pieces of the demo's articles, about 500 tokens each, drawn by Zipf's law out of 200, each
time in a new order, and a question. Plain vLLM with its prefix cache on is asked the same prompts as the
presets, load by load, engines in turn on one machine. A closed loop has so many clients, each of which
asks again as soon as it is answered; in an open loop requests come by a Poisson process, whether others
are answered or not.

    python benchmarks/load.py [--clients 1,4,8] [--rates 0.2,0.5,1] [--requests 24] [--model FOLDER]

Writes build/bench/load.json and load.png. About an hour on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.articles import article_pieces, zipf_prompts
from workbench.chunks import store_chunks
from workbench.figures import save

PERCENTILES = (50, 95, 99)
Tokens = list[int]


@dataclass
class Outcome:
    """What one way of answering did under one load."""

    ttft_ms: list[float] = field(default_factory=list)
    between_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    read_bytes: int = 0

    def figures(self) -> dict[str, Any]:
        asked = len(self.ttft_ms)
        return {
            "requests": asked,
            "ttft_ms": percentiles(self.ttft_ms),
            "between_tokens_ms": percentiles(self.between_ms),
            "requests_per_s": round(asked / self.seconds, 3),
            "cpu_s_per_request": round(self.cpu_s / asked, 3),
            "read_mb_per_request": round(self.read_bytes / asked / 1e6, 2),
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in PERCENTILES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--clients", default="1,4,8")
    parser.add_argument("--rates", default="0.2,0.5,1", help="requests a second of the open loop")
    parser.add_argument("--requests", type=int, default=24, help="of each load")
    parser.add_argument("--presets", default="balanced,fast")
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--chunk-tokens", type=int, default=500)
    parser.add_argument("--picked", type=int, default=6, help="chunks of a prompt")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument(
        "--store", type=Path, help="kept, and used again; a temporary one if left out"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, arguments.store or Path(folder))
    path = save("load", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def measure(arguments: argparse.Namespace, store: Path) -> dict[str, Any]:
    length = arguments.chunk_tokens * arguments.picked
    engine_args: dict[str, Any] = {
        "max_model_len": length + arguments.answer_tokens + 128,
        "kv_cache_memory_bytes": 2 << 30,
        "seed": 0,
    }
    model = str(arguments.model)
    with (
        Engine(model, **engine_args) as plain,
        Engine(model, store=store, **engine_args) as ours,
    ):
        pieces = article_pieces(ours.tokenizer, arguments.chunks, arguments.chunk_tokens)
        store_chunks(ours, pieces, namespace="default", reference=pieces[-1][::-1])
        ways = {"plain": (plain, ReuseOptions(enabled=False))}
        for preset in arguments.presets.split(","):
            ways[preset] = (ours, ReuseOptions.preset(preset))
        loads: list[dict[str, Any]] = []
        kinds: list[tuple[str, float]] = [
            ("clients", int(n)) for n in arguments.clients.split(",") if n
        ]
        kinds += [("rate", float(n)) for n in arguments.rates.split(",") if n]
        for index, (kind, amount) in enumerate(kinds):
            drawn = zipf_prompts(ours.tokenizer, pieces, arguments.picked, index)
            asked = list(itertools.islice(drawn, arguments.requests))
            row: dict[str, Any] = {kind: amount, "ways": {}}
            for way, (engine, options) in ways.items():
                engine.reset_prefix_cache()
                outcome = run(engine, options, asked, kind, amount, arguments.answer_tokens)
                row["ways"][way] = outcome.figures()
                print(kind, amount, way, row["ways"][way], flush=True)
            loads.append(row)
    return {
        "model": arguments.model.name,
        "chunk_tokens": arguments.chunk_tokens,
        "chunks": arguments.chunks,
        "prompt_tokens": length,
        "answer_tokens": arguments.answer_tokens,
        "loads": loads,
    }


def run(
    engine: Engine,
    options: ReuseOptions,
    asked: list[Tokens],
    kind: str,
    amount: float,
    answer_tokens: int,
) -> Outcome:
    outcome = Outcome()
    sampling = {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}

    async def ask(prompt: Tokens) -> None:
        last = began = time.perf_counter()
        first = True
        async for _ in engine.astream(prompt, sampling=sampling, reuse=options):
            now = time.perf_counter()
            (outcome.ttft_ms if first else outcome.between_ms).append(
                1000 * (now - (began if first else last))
            )
            first, last = False, now

    async def closed() -> None:
        waiting = iter(asked)

        async def client() -> None:
            for prompt in waiting:
                await ask(prompt)

        await asyncio.gather(*(client() for _ in range(int(amount))))

    async def opened() -> None:
        async with asyncio.TaskGroup() as group:
            async for prompt in arrivals(asked, amount):
                group.create_task(ask(prompt))

    used = Used()
    began = time.perf_counter()
    asyncio.run(closed() if kind == "clients" else opened())
    outcome.seconds = time.perf_counter() - began
    outcome.cpu_s, outcome.read_bytes = used.since()
    return outcome


async def arrivals(asked: list[Tokens], rate: float) -> AsyncIterator[Tokens]:
    """Prompts by a Poisson process, the same for all ways."""
    numbers = random.Random(0)
    for prompt in asked:
        yield prompt
        await asyncio.sleep(numbers.expovariate(rate))


class Used:
    """What this process and those that it started have used since."""

    def __init__(self) -> None:
        self._before = self._now()

    def since(self) -> tuple[float, int]:
        """Seconds of processor time, and bytes read, from the page cache too."""
        now = self._now()
        return now[0] - self._before[0], now[1] - self._before[1]

    def _now(self) -> tuple[float, int]:
        own = psutil.Process(os.getpid())
        seconds, read = 0.0, 0
        for process in [own, *own.children(recursive=True)]:
            times = process.cpu_times()
            seconds += times.user + times.system
            read += process.io_counters().read_chars
        return seconds, read


def draw(figure: Any, figures: dict[str, Any]) -> None:
    """The first token's time and the requests a second, load by load."""
    loads = figures["loads"]
    names = [
        f"{row['clients']} clients" if "clients" in row else f"{row['rate']:g}/s" for row in loads
    ]
    left, right = figure.subplots(1, 2)
    ways = list(loads[0]["ways"])
    for index, way in enumerate(ways):
        places = np.arange(len(loads)) + 0.25 * (index - (len(ways) - 1) / 2)
        told = [row["ways"][way] for row in loads]
        left.bar(places, [one["ttft_ms"]["p50"] / 1000 for one in told], 0.24, label=way)
        left.plot(places, [one["ttft_ms"]["p95"] / 1000 for one in told], "k_", markersize=12)
        right.bar(places, [one["requests_per_s"] for one in told], 0.24)
    for axes, title in ((left, "time to first token, s (p50; line: p95)"), (right, "requests/s")):
        axes.set_xticks(range(len(loads)), names)
        axes.set_title(title)
    left.legend()


if __name__ == "__main__":
    main()
