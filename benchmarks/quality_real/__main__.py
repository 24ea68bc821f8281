"""How close reuse comes on a real model: what chunks are stored behind, which tokens are computed again.

    python -m benchmarks.quality_real MODEL [--contexts 105] [--passages 4] [--tokens 192]

MODEL is a Hugging Face folder of Llama's, Qwen2's or Qwen3's kind (`make model` makes one). The tasks are
RULER's family and the questions on `examples/articles`, half of them with passages in document order,
half as a retriever orders them; or, with `--data FILE`, records of MuSiQue's form. In plain PyTorch,
bfloat16, one prompt at a time; all that a way computes is counted as its charge.

Writes build/bench/quality_real_<model>.json after each context, from which a stopped run goes on, and a
plot at the end. About 15 seconds a context of 800 tokens on two cores for a model of 0.5 billion
parameters.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.quality_real import tasks
from benchmarks.quality_real.network import Cache, Network
from benchmarks.quality_real.outcome import Outcome
from benchmarks.quality_real.published import PUBLISHED, PublishedKVDeviation
from benchmarks.quality_real.report import BASE, draw, table
from benchmarks.quality_real.ways import (
    Context,
    Stored,
    asked_score,
)
from semkv_rag.config import PRESETS
from semkv_rag.corpus.context import PASSAGE
from workbench.figures import OUTPUT, save

ARTICLES = ROOT / "examples" / "articles"
NOTHING = torch.zeros(0, dtype=torch.int64)
CHARGES = (0.05, 0.1, 0.15, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--contexts", type=int, default=105)
    parser.add_argument("--passages", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192, help="of each passage, at most")
    parser.add_argument("--family", action="append", help="only these; may be given several times")
    parser.add_argument("--order", choices=("retrieved", "document"), help="both, if left out")
    parser.add_argument("--presets", action="store_true", help="the presets and `auto` alone")
    parser.add_argument("--data", type=Path, help="records of MuSiQue's form instead")
    parser.add_argument("--name", help="of the output; the model's, if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    network = Network(arguments.model)
    name = f"quality_real_{arguments.name or network.name}"
    kept = OUTPUT / f"{name}.json"
    about = {
        "model": network.name,
        "passages": arguments.passages,
        "tokens": arguments.tokens,
        "seed": arguments.seed,
        "families": arguments.family,
        "order": arguments.order,
        "presets": arguments.presets or None,
        "dtype": "bfloat16",
    }
    rows: list[dict[str, Any]] = []
    if kept.exists():
        before = json.loads(kept.read_text())
        rows = before["contexts"] if all(before.get(k) == v for k, v in about.items()) else []
    made = tasks.Maker(
        ARTICLES,
        network.tokenizer,
        arguments.tokens,
        arguments.seed,
        arguments.family,
        arguments.data,
        arguments.order,
    )
    began = time.monotonic()
    for number in range(len(rows), arguments.contexts):
        task = made.task(number, arguments.passages)
        rows.append(measure(network, task, presets=arguments.presets))
        save(name, {**about, "contexts": rows})
        done = number + 1
        print(f"{done} of {arguments.contexts}, {time.monotonic() - began:.0f} s", flush=True)
    figures = {**about, "ways": table(rows), "contexts": rows}
    path = save(name, figures, lambda figure: draw(figure, rows))
    for line in figures["ways"]["all"]:
        print(line)
    print(f"written to {path.relative_to(ROOT)}")


@torch.inference_mode()
def measure(network: Network, task: tasks.Task, *, presets: bool = False) -> dict[str, Any]:
    """One context under all ways, or under those that users choose from."""
    passage = network.tokenizer.encode(PASSAGE, add_special_tokens=False)
    context = Context(network, task, passage)
    prefix, left = context.stored("prefix"), context.stored("left")
    ways = of_presets(context, prefix, left) if presets else of_study(context, prefix, left)
    context.finish()
    return {
        "family": task.family,
        "order": task.order,
        "tokens": context.end,
        "question_tokens": len(context.question),
        "full": task.score(context.full_text),
        "bare": task.score(context.bare_text()),
        "full_text": context.full_text,
        "wanted": task.wanted,
        "ways": {name: asdict(outcome) for name, outcome in ways.items()},
    }


def of_presets(context: Context, prefix: Cache, left: Cache) -> dict[str, Outcome]:
    """Plain reuse, the presets, and `ratio="auto"` with their promises."""
    alone = Stored(context, prefix, exact_first=True)
    both = Stored(context, left, exact_first=True)
    ways = {BASE: alone.blended(NOTHING, 0)}
    seen, _, cost = both.looked
    sensitivity = both.change(alone.cache)
    weighed = seen * sensitivity
    scores = asked_score(both, "sensitivity_attention", sensitivity)
    for name in ("fast", "balanced"):
        preset = PRESETS[name]
        ways[name] = both.scored(scores, float(preset.ratio), cost, weighed)
        ways[f"{name}, auto"] = both.automatic(scores, preset.promise, cost, weighed)
    return ways


def of_study(context: Context, prefix: Cache, left: Cache) -> dict[str, Outcome]:
    """What was compared to decide on the presets."""
    alone = Stored(context, prefix, exact_first=True)
    left_only = Stored(context, left.clone(), exact_first=False)
    both = Stored(context, left, exact_first=True)
    ways: dict[str, Outcome] = {}
    ways[BASE] = alone.blended(NOTHING, 0)
    ways["left: as stored"] = both.blended(NOTHING, 0)
    ways["exact"] = both.blended(torch.arange(len(both.candidates)), 0)
    attention, _, cost = both.looked
    sensitivity = both.change(alone.cache)
    weighed = attention * sensitivity
    sensitive = asked_score(both, "sensitivity_attention", sensitivity)
    for charge in CHARGES:
        share = f"{charge * 100:g} %"
        ratio = both.ratio_asked(charge)
        ways[f"left: sensitivity_attention, {share}"] = both.scored(sensitive, ratio, cost, weighed)
        picked = alone.ratio_checked(charge)
        if picked is not None and charge < 0.2:
            for name, rule in PUBLISHED.items():
                ways[f"head: {name}, {share}"] = alone.checked(rule(), picked)
    ratio = both.ratio_asked(0.15)
    ways["left: kv_deviation_published, 15 %"] = both.checked(
        PublishedKVDeviation(), both.ratio_checked(0.15) or 0.0
    )
    ways["left: query_attention, 15 %"] = both.scored(
        asked_score(both, "query_attention"), ratio, cost
    )
    true = (attention * both.change(context.full)).sum(0)
    ways["left: oracle, 15 %"] = both.scored(true, ratio, cost)
    _, _, cost = left_only.looked
    sensitive = asked_score(left_only, "sensitivity_attention", left_only.change(prefix))
    ways["left only: sensitivity_attention, 15 %"] = left_only.scored(
        sensitive, left_only.ratio_asked(0.15), cost
    )
    return ways


if __name__ == "__main__":
    main()
