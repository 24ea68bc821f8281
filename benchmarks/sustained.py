"""Over many new prompts: are chunks still found, does the first token come as soon, does memory stay?

Prompts are six pieces of the demo's articles, drawn by Zipf's law out of 200, each time in a new order,
and a question of their own: the prompts of `load.py`, asked one behind the other. Behind each one a short
prompt is answered without reuse. Its time tells how busy the machine is: the time to the first token is
given as it is, and as a multiple of that one.

Memory is the proportional set size of this process and of all that the engine started: what they share
counts once, the page cache not. The paged cache is small, so that all of it was written to within the
first prompts, which are asked before the others and do not count.

    python benchmarks/sustained.py [--prompts 300] [--chunk-tokens 500] [--ram-bytes 0] [--model FOLDER]

Writes build/bench/sustained.json and sustained.png. Ends with 1 where the last third is worse than the
first: fewer tokens reused, or a first token later by more than noise, or memory more than 2 % higher.
Twenty minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from workbench.articles import article_pieces, zipf_prompts
from workbench.chunks import store_chunks
from workbench.figures import save

Tokens = list[int]
WARM_UP = 20
PLAIN_TOKENS = 64
DRAWN = 10_000
MEMORY_LIMIT = 0.02


@dataclass(frozen=True)
class Asked:
    """One prompt.

    Attributes:
        ttft_ms: until its first token came.
        plain_ms: the same of a short prompt without reuse, right behind it.
        reused_share: of its tokens, those that were reused.
        memory_bytes: of all processes, afterwards.
    """

    ttft_ms: float
    plain_ms: float
    reused_share: float
    memory_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--preset", default="balanced")
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--chunk-tokens", type=int, default=500)
    parser.add_argument("--picked", type=int, default=6, help="chunks of a prompt")
    parser.add_argument("--answer-tokens", type=int, default=2)
    parser.add_argument("--ram-bytes", type=int, default=0)
    parser.add_argument(
        "--store", type=Path, help="kept, and used again; a temporary one if left out"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = measure(arguments, arguments.store or Path(folder))
    figures = {
        "model": arguments.model.name,
        **{
            name: getattr(arguments, name)
            for name in ("preset", "chunks", "chunk_tokens", "picked", "ram_bytes")
        },
        "thirds": compared(asked),
        "prompts": [asdict(one) for one in asked],
    }
    path = save("sustained", figures, lambda figure: draw(figure, asked))
    for name, value in figures["thirds"].items():
        print(f"{name}: {value}")
    print(f"written to {path.relative_to(ROOT)}")
    sys.exit(0 if figures["thirds"]["holds"] else 1)


def measure(arguments: argparse.Namespace, store: Path) -> list[Asked]:
    length = arguments.chunk_tokens * arguments.picked
    engine_args: dict[str, Any] = {
        "max_model_len": length + arguments.answer_tokens + 128,
        "kv_cache_memory_bytes": 256 << 20,
        "seed": 0,
    }
    with Engine(
        str(arguments.model), store=store, ram_bytes=arguments.ram_bytes, **engine_args
    ) as engine:
        pieces = article_pieces(engine.tokenizer, arguments.chunks, arguments.chunk_tokens)
        assert engine.store is not None
        if len(list(engine.store.chunks(engine.fingerprint, "default"))) < len(pieces):
            store_chunks(engine, pieces, namespace="default", reference=pieces[-1][::-1])
        prompts = zipf_prompts(engine.tokenizer, pieces, arguments.picked, seed=0)
        reuse = ReuseOptions.preset(arguments.preset)
        asked = []
        for number, prompt in enumerate(
            itertools.islice(prompts, WARM_UP + arguments.prompts), -WARM_UP
        ):
            one = ask(engine, prompt, short(engine, number), reuse, arguments.answer_tokens)
            if number >= 0:
                asked.append(one)
            if number % 50 == 0:
                print(number, one, flush=True)
    return asked


def short(engine: Engine, number: int) -> Tokens:
    """A short prompt that was not asked before."""
    numbers = np.random.default_rng(number + WARM_UP)
    drawn: Tokens = numbers.integers(1000, len(engine.tokenizer) - 1000, PLAIN_TOKENS).tolist()
    return drawn


def ask(
    engine: Engine, prompt: Tokens, plain: Tokens, reuse: ReuseOptions, answer_tokens: int
) -> Asked:
    ttft_ms, answer = timed(engine, prompt, reuse, answer_tokens)
    plain_ms, _ = timed(engine, plain, ReuseOptions(enabled=False), 1)
    report = answer.report
    reused = report.exact_tokens + report.reused_tokens
    return Asked(ttft_ms, plain_ms, reused / len(prompt), memory_bytes())


def timed(
    engine: Engine, prompt: Tokens, reuse: ReuseOptions, answer_tokens: int
) -> tuple[float, Completion]:
    sampling = {"max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    parts = iter(engine.stream(prompt, sampling=sampling, reuse=reuse))
    first = next(parts)
    took = time.perf_counter() - began
    *_, last = first, *parts
    return 1000 * took, last


def memory_bytes() -> int:
    own = psutil.Process(os.getpid())
    return sum(process.memory_full_info().pss for process in [own, *own.children(recursive=True)])


def compared(asked: Sequence[Asked]) -> dict[str, Any]:
    """The last third over the first: medians, and the range of their ratio at 95 %, by bootstrap."""
    third = len(asked) // 3
    told: dict[str, Any] = {}
    values = {
        "ttft_ms": [one.ttft_ms for one in asked],
        "ttft_over_plain": [one.ttft_ms / one.plain_ms for one in asked],
        "reused_share": [one.reused_share for one in asked],
        "memory_bytes": [float(one.memory_bytes) for one in asked],
    }
    for name, series in values.items():
        told[name] = change(series[:third], series[-third:])
    told["hits"] = sum(one.reused_share > 0 for one in asked)
    told["memory_span"] = round(max(values["memory_bytes"]) / min(values["memory_bytes"]) - 1, 4)
    told["holds"] = (
        told["hits"] == len(asked)
        and told["reused_share"]["ratio_95"][1] >= 1
        and told["ttft_over_plain"]["ratio_95"][0] <= 1
        and told["memory_bytes"]["ratio"] <= 1 + MEMORY_LIMIT
    )
    return told


def change(first: Sequence[float], last: Sequence[float]) -> dict[str, Any]:
    numbers = np.random.default_rng(0)
    drawn = [np.median(numbers.choice(part, (DRAWN, len(part))), axis=1) for part in (first, last)]
    low, high = np.percentile(drawn[1] / drawn[0], (2.5, 97.5))
    medians = [float(np.median(part)) for part in (first, last)]
    return {
        "first": round(medians[0], 4),
        "last": round(medians[1], 4),
        "ratio": round(medians[1] / medians[0], 4),
        "ratio_95": [round(float(low), 4), round(float(high), 4)],
    }


def draw(figure: Any, asked: Sequence[Asked]) -> None:
    """Each over the prompts."""
    axes = figure.subplots(3, 1, sharex=True)
    series = {
        "time to first token, ms": [one.ttft_ms for one in asked],
        "tokens reused, share": [one.reused_share for one in asked],
        "memory, GB": [one.memory_bytes / 1e9 for one in asked],
    }
    for axis, (title, values) in zip(axes, series.items(), strict=True):
        axis.plot(values, ".", markersize=3)
        axis.set_title(title)
        axis.set_ylim(0, 1.1 * max(values))
    axes[-1].set_xlabel("prompts")


if __name__ == "__main__":
    main()
