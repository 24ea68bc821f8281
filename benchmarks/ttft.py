"""Time to first token: plain vLLM, a miss, and blends, interleaved in one run.

Two engines stand side by side: plain vLLM without our connector, and ours. Two processes with the same
work differ by some per cent for as long as they live, so there is `off` too: our engine with reuse
switched off for the request, which is vLLM's own prefill. A miss is to be read against it, and speed-ups
are over whichever of plain and `off` was faster in that round.

Prompts are 512-token pieces of the demo's articles behind a few tokens of text, so that none is exact,
and a question; nothing comes from vLLM's prefix cache. Each round has an order and a question of its own:
what a blend picked for a prompt is remembered, and asking it again is cheaper. vLLM computes on as many
cores in both engines (`VLLM_CPU_NUM_OF_RESERVED_CPU`, in workbench/figures.py). Beside each speed-up
stands the arithmetic limit of its picks: what plain prefill computes, over what the blend must compute
(linear layers, and attention from where the picked tokens stand), if nothing else took time. Ratios are
of `kv_deviation`; the presets, which ask the question, are measured beside them.

    python benchmarks/ttft.py [--lengths 1024,2048,4096,7680] [--repeats 5] [--model FOLDER]

Writes build/bench/ttft.json and ttft.png. About 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.articles import article_pieces
from workbench.chunks import store_chunks
from workbench.figures import save, summary
from workbench.inside import inside

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # lets `inside` ask the worker what it picked

CHUNK = 512
TEXT = "Passages from an encyclopedia, in no order:\n\n"
QUESTION = "\n\nQuestion {}: what do these passages have in common?\nAnswer:"
SELECTOR = "kv_deviation"
RATIOS = (0.0, 0.05, 0.15, 0.30, 1.0)
PRESETS = ("fast", "balanced")


@dataclass(frozen=True)
class Lengths:
    """Of a prompt's parts, in tokens."""

    text: int
    chunks: int
    question: int

    @property
    def prompt(self) -> int:
        return self.text + self.chunks + self.question


@dataclass(frozen=True)
class Shape:
    """What a forward costs, in multiply-adds."""

    layers: int
    hidden: int
    query: int
    key_value: int
    intermediate: int

    @classmethod
    def of(cls, model: Path) -> Shape:
        config = json.loads((model / "config.json").read_text())
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            query=dim * config["num_attention_heads"],
            key_value=dim * config["num_key_value_heads"],
            intermediate=config["intermediate_size"],
        )

    def projections(self) -> float:
        """Of one token in one layer: its query, key and value."""
        return self.hidden * (self.query + 2 * self.key_value)

    def rest(self, context: float) -> float:
        """Of one token in one layer: attention over `context` tokens, output and MLP."""
        attention = 2 * self.query * context
        return attention + self.hidden * self.query + 3 * self.hidden * self.intermediate

    def token(self, context: float) -> float:
        """Of one token in one layer."""
        return self.projections() + self.rest(context)

    def limit(self, lengths: Lengths, computed: list[int] | None, *, asks: bool) -> float:
        """How much more plain prefill computes than a blend and the question behind it.

        Args:
            computed: positions of the tokens that all layers compute; None for all of them.
            asks: whether text and question are run over the stored KV first, to pick by what the question
                attends to; else all tokens are run up to the check layer, unless none is picked.
        """
        covered = lengths.text + lengths.chunks
        if computed is None:
            computed = list(range(covered))
        blended = sum(self.token(position + 1) for position in computed)
        blended += lengths.question * self.token(covered)
        total = self.layers * blended
        if asks:
            total += self.layers * lengths.question * self.token(covered)
        elif lengths.text < len(computed) < covered:
            layer = ReuseOptions().check_layer
            total += layer * covered * self.token(covered / 2) + covered * self.projections()
        return self.layers * lengths.prompt * self.token(lengths.prompt / 2) / total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", default="1024,2048,4096,7680")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(arguments.model, Path(folder) / "store", lengths, arguments)
    path = save("ttft", figures, lambda figure: draw(figure, figures))
    print(f"written to {path.relative_to(ROOT)}")


def measure(
    model: Path, store: Path, lengths: list[int], arguments: argparse.Namespace
) -> dict[str, Any]:
    shape = Shape.of(model)
    engine_args: dict[str, Any] = {
        "dtype": arguments.dtype,
        "max_model_len": max(lengths) + 128,
        "kv_cache_memory_bytes": 1 << 30,
        "seed": 0,
    }
    results = []
    with (
        Engine(str(model), **engine_args) as plain,
        Engine(str(model), store=store, **engine_args) as ours,
    ):
        tokenizer = ours.tokenizer
        pieces = article_pieces(tokenizer, 2 * max(lengths) // CHUNK + 1, CHUNK)
        stored = pieces[: max(lengths) // CHUNK]
        unstored = [token for piece in pieces[len(stored) : -1] for token in piece]
        chunks = store_chunks(ours, stored, namespace="default", reference=pieces[-1])
        text = tokenizer.encode(TEXT, add_special_tokens=False)
        for length in lengths:
            times: dict[str, list[float]] = {}
            reports: dict[str, dict[str, Any]] = {}
            computed: dict[str, list[int] | None] = {}
            for repeat in range(arguments.repeats + 1):  # the first warms up
                question = tokenizer.encode(QUESTION.format(repeat), add_special_tokens=False)
                order = list(range(length // CHUNK))
                random.Random(length + repeat).shuffle(order)
                prompt = text + [t for index in order for t in chunks[index].tokens] + question
                unknown = text + unstored[:length] + question
                runs: list[tuple[str, Engine, list[int], ReuseOptions]] = [
                    ("plain", plain, prompt, ReuseOptions()),
                    ("off", ours, unknown, ReuseOptions(enabled=False)),
                    ("miss", ours, unknown, ReuseOptions()),
                    *(
                        (f"{ratio:.0%}", ours, prompt, ReuseOptions(ratio=ratio, selector=SELECTOR))
                        for ratio in RATIOS
                    ),
                    *((name, ours, prompt, ReuseOptions.preset(name)) for name in PRESETS),
                ]
                random.Random(repeat).shuffle(runs)
                for name, engine, tokens, options in runs:
                    engine.reset_prefix_cache()
                    answer = engine.generate(
                        tokens, sampling={"max_tokens": 1, "temperature": 0}, reuse=options
                    )
                    assert answer.report.cached_tokens == answer.report.exact_tokens == 0
                    assert name != "miss" or not answer.report.reused_tokens
                    if repeat:
                        times.setdefault(name, []).append(answer.ttft_ms)
                    reports[name] = answer.report.to_mapping()
                    if name in PRESETS:  # the question was run over the stored KV
                        charged = answer.report.charged_ratio * (len(text) + length)
                        assert charged > answer.report.recomputed_tokens + len(question)
                    if answer.report.recomputed_tokens < answer.report.reused_tokens:
                        looked = answer.report.recomputed_tokens > 0
                        picked = inside(engine, latest_picks) if looked else []
                        computed[name] = [*range(len(text)), *picked]
            lengths_of = Lengths(len(text), length, len(question))
            results.append(row(shape, lengths_of, times, reports, computed))
            print_row(results[-1])
    return {
        "model": {
            **shape.__dict__,
            "dtype": arguments.dtype,
            "weights": arguments.model.name,
        },
        "chunk_tokens": CHUNK,
        "text_tokens": len(text),
        "question_tokens": len(question),
        "selector": SELECTOR,
        "presets": {name: ReuseOptions.preset(name).to_mapping() for name in PRESETS},
        "check_layer": ReuseOptions().check_layer,
        "repeats": arguments.repeats,
        "lengths": results,
    }


def latest_picks(worker: Any) -> list[int]:
    """The prompt positions that the latest blend picked; called in the engine's worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    latest = next(reversed(get_kv_transfer_group().executor._blend_pass.picked.values()))
    picked: list[int] = latest.rows.tolist()
    return picked


def row(
    shape: Shape,
    lengths: Lengths,
    times: dict[str, list[float]],
    reports: dict[str, dict[str, Any]],
    computed: dict[str, list[int] | None],
) -> dict[str, Any]:
    """One prompt length's figures. Ratios are taken round by round: runs that stood side by side.

    Args:
        computed: positions of the tokens that all layers compute, by way; missing where all are.
    """
    methods = {}
    prefill = [min(pair) for pair in zip(times["plain"], times["off"], strict=True)]
    for name, values in times.items():
        over = times["off"] if name == "miss" else prefill
        speedups = [p / v for p, v in zip(over, values, strict=True)]
        entry: dict[str, Any] = {"ttft_ms": summary(values), "speedup": summary(speedups)}
        if reports[name]["reused_tokens"]:
            limit = shape.limit(lengths, computed.get(name), asks=name in PRESETS)
            entry["limit"] = round(limit, 3)
            entry["of_limit"] = round(entry["speedup"]["median"] / limit, 3)
            entry["report"] = {
                key: reports[name][key]
                for key in ("reused_tokens", "recomputed_tokens", "load_ms", "blend_ms", "match_ms")
            }
        methods[name] = entry
    return {"prompt_tokens": lengths.prompt, "methods": methods}


def print_row(result: dict[str, Any]) -> None:
    print(f"{result['prompt_tokens']} prompt tokens")
    for name, entry in result["methods"].items():
        times, limit = entry["ttft_ms"], entry.get("limit")
        against = f", limit {limit:.2f}, {entry['of_limit']:.2f} of it" if limit else ""
        print(
            f"  {name:8} {times['median']:9.1f} ms ({times['min']:.1f} to {times['max']:.1f}), "
            f"speed-up {entry['speedup']['median']:.3f}{against}",
            flush=True,
        )


def draw(figure: Any, figures: dict[str, Any]) -> None:
    """Speed-ups by prompt length, with each selector's limit dashed."""
    axes = figure.subplots()
    lengths = [result["prompt_tokens"] for result in figures["lengths"]]
    for index, name in enumerate([*(f"{ratio:.0%}" for ratio in RATIOS), *PRESETS]):
        entries = [result["methods"][name] for result in figures["lengths"]]
        medians = [entry["speedup"]["median"] for entry in entries]
        low = [m - entry["speedup"]["min"] for m, entry in zip(medians, entries, strict=True)]
        high = [entry["speedup"]["max"] - m for m, entry in zip(medians, entries, strict=True)]
        axes.errorbar(
            lengths,
            medians,
            yerr=[low, high],
            marker="o",
            color=f"C{index}",
            label=name if name in PRESETS else f"{name} recomputed",
        )
        limits = [entry["limit"] for entry in entries]
        axes.plot(lengths, limits, "--", color=f"C{index}", alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("prompt tokens, 512-token chunks")
    axes.set_ylabel("time to first token: plain vLLM / blend")
    axes.set_title("Speed-up over plain prefill (dashed: arithmetic limit)")
    axes.legend()


if __name__ == "__main__":
    main()
