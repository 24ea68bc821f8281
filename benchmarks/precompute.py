"""Precompute against plain prefill: tokens/s of the same chunks, interleaved in one run.

Precompute is the capture of the chunks, their files on disk, and their rows in the index.

    python benchmarks/precompute.py [--chunks 64] [--repeats 5]

Writes build/bench/precompute.json and precompute.png. About 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.ttft import CHUNK, Shape
from semkv_rag.engine import Engine
from workbench.chunks import random_tokens, store_chunks
from workbench.figures import save, summary
from workbench.tiny_models import build_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_model("mid", Path(folder) / "mid")
        figures = measure(model, Path(folder) / "store", arguments.chunks, arguments.repeats)
    path = save("precompute", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def measure(model: Path, store: Path, chunks: int, repeats: int) -> dict[str, Any]:
    engine_args: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
    }
    rates: dict[str, list[float]] = {"plain": [], "precompute": []}
    sampling = {"max_tokens": 1, "temperature": 0, "skip_reading_prefix_cache": True}
    with (
        Engine(str(model), **engine_args) as plain,
        Engine(str(model), store=store, **engine_args) as ours,
    ):
        for repeat in range(repeats + 1):  # the first warms up
            tokens = [random_tokens(repeat * chunks + i, CHUNK, 1000) for i in range(chunks)]
            jobs = [
                ("plain", lambda t=tokens: plain.generate_many(t, sampling=sampling)),
                ("precompute", lambda t=tokens: store_chunks(ours, t, namespace="default")),
            ]
            for name, job in jobs if repeat % 2 else jobs[::-1]:
                began = time.perf_counter()
                job()
                if repeat:
                    rates[name].append(chunks * CHUNK / (time.perf_counter() - began))
    ratios = [p / v for p, v in zip(rates["precompute"], rates["plain"], strict=True)]
    for name, values in rates.items():
        print(f"{name:10} {summary(values)} tokens/s")
    print(f"ratio      {summary(ratios)}")
    return {
        "model": {**Shape.of(model).__dict__, "dtype": "bfloat16", "weights": "random"},
        "chunk_tokens": CHUNK,
        "chunks": chunks,
        "repeats": repeats,
        "tokens_per_second": {name: summary(values) for name, values in rates.items()},
        "ratio": summary(ratios),
        "rates": rates,
    }


def draw(figure: Any, figures: dict[str, Any]) -> None:
    axes = figure.subplots()
    for name, values in figures["rates"].items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("run")
    axes.set_ylabel("tokens/s")
    axes.set_title(f"Precompute against plain prefill (ratio {figures['ratio']['median']:.2f})")
    axes.legend()


if __name__ == "__main__":
    main()
