"""What a long prompt does to others: the gaps between their tokens while it is blended or prefilled.

Some requests decode. Then a prompt of stored chunks comes, in a new order each time: plain vLLM, in an
engine of its own, cuts its prefill into chunks; ours blends it, in slices. The gaps are those of the
other requests' tokens that end between the prompt's arrival and its first token.

    python benchmarks/beside.py [--tokens 8192] [--others 4] [--rounds 5] [--model FOLDER]

Writes build/bench/beside.json and beside.png. About ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.chunks import Stored, random_tokens, store_chunks
from workbench.figures import save, summary

CHUNK = 512
ANSWER = 4
DECODED = 4000
"""Tokens that the others may decode: more than they have time for."""


@dataclass
class Seen:
    """Of one way, over all rounds."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[list[float]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        gaps = [gap for of_round in self.gaps_ms for gap in of_round]
        return {
            "ttft_ms": summary(self.ttft_ms),
            "gaps": len(gaps),
            "gap_ms": {f"p{p}": round(float(np.percentile(gaps, p)), 1) for p in (50, 95, 99)},
            "gap_p95_of_rounds_ms": summary([float(np.percentile(g, 95)) for g in self.gaps_ms]),
            "tokens_of_others_per_s": round(len(gaps) / (sum(self.ttft_ms) / 1000), 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt's chunks, about")
    parser.add_argument("--others", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preset", default="balanced")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments, Path(folder))
    path = save("beside", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def measure(arguments: argparse.Namespace, store: Path) -> dict[str, Any]:
    count = (arguments.tokens - 64) // CHUNK
    engine_args: dict[str, Any] = {"kv_cache_memory_bytes": 3 << 30, "seed": 0}
    model = str(arguments.model)
    with (
        Engine(model, **engine_args) as plain,
        Engine(model, store=store, **engine_args) as ours,
    ):
        tokens = [random_tokens(seed, CHUNK) for seed in range(count)]
        chunks = store_chunks(ours, tokens, namespace="default")
        ways = {"plain": Seen(), arguments.preset: Seen()}
        for number in range(-1, arguments.rounds):
            for way, seen in ways.items():
                engine = plain if way == "plain" else ours
                round_of(engine, way, seen, chunks, number, arguments.others)
                if number < 0:
                    seen.ttft_ms.clear()
                    seen.gaps_ms.clear()
                else:
                    print(number, way, seen.figures(), flush=True)
    return {
        "model": arguments.model.name,
        "prompt_tokens": count * CHUNK,
        "others": arguments.others,
        "rounds": arguments.rounds,
        "ways": {way: seen.figures() for way, seen in ways.items()},
    }


def round_of(
    engine: Engine, way: str, seen: Seen, chunks: list[Stored], number: int, others: int
) -> None:
    order = list(chunks)
    random.Random(number).shuffle(order)
    prompt = [token for chunk in order for token in chunk.tokens] + random_tokens(900 + number, 24)
    options = ReuseOptions(enabled=False) if way == "plain" else ReuseOptions.preset(way)
    engine.reset_prefix_cache()
    ttft_ms, gaps_ms = asyncio.run(ask_beside(engine, prompt, options, others))
    seen.ttft_ms.append(ttft_ms)
    seen.gaps_ms.append(gaps_ms)


async def ask_beside(
    engine: Engine, prompt: list[int], options: ReuseOptions, others: int
) -> tuple[float, list[float]]:
    """The prompt's time to first token, and the gaps between others' tokens meanwhile, ms."""
    came: list[list[float]] = [[] for _ in range(others)]

    async def decode(index: int) -> None:
        sampling = {"max_tokens": DECODED, "temperature": 0, "ignore_eos": True}
        reuse = ReuseOptions(enabled=False)
        async for _ in engine.astream(
            random_tokens(800 + index, 32), sampling=sampling, reuse=reuse
        ):
            came[index].append(time.perf_counter())

    decoding = [asyncio.create_task(decode(index)) for index in range(others)]
    while min(map(len, came)) < 8:
        await asyncio.sleep(0.05)
    began, first = time.perf_counter(), 0.0
    sampling = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    async for _ in engine.astream(prompt, sampling=sampling, reuse=options):
        first = first or time.perf_counter()
    for task in decoding:
        task.cancel()
    await asyncio.gather(*decoding, return_exceptions=True)
    gaps = [
        1000 * (after - before)
        for times in came
        for before, after in itertools.pairwise(times)
        if after > began and before < first
    ]
    return 1000 * (first - began), gaps


def draw(figure: Any, figures: dict[str, Any]) -> None:
    """The gaps beside the prompt's time to first token."""
    left, right = figure.subplots(1, 2)
    for way, told in figures["ways"].items():
        left.bar(["p50", "p95", "p99"], told["gap_ms"].values(), 0.7, alpha=0.6, label=way)
        right.bar([way], told["ttft_ms"]["median"] / 1000)
    left.set_title(f"gap between tokens of {figures['others']} others, ms")
    left.legend()
    right.set_title(f"first token of {figures['prompt_tokens']:,} tokens, s")


if __name__ == "__main__":
    main()
