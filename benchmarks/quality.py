"""Prints the yardstick's acceptance list for each model of its family.

    python benchmarks/quality.py [--models FOLDER ...] [--contexts 25] [--seeds 4]

Writes build/bench/quality.json.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from workbench.figures import save
from workbench.quality import grammar
from workbench.quality.acceptance import Context, acceptance
from workbench.quality.export import MODELS, load
from workbench.quality.study import Scores, control, cross, make_batches, study, tells


def describe() -> Context:
    """Shares that belong to the contexts, counted over a thousand of them."""
    draw = random.Random(31)
    contexts = [grammar.make_context(draw, held=True) for _ in range(1000)]
    tokens = sum(len(c.tokens) for c in contexts)
    matter = sum(c.cross for k in contexts for f in k.facts for c in f.carriers)
    told = [f for k in contexts for f in k.facts if f.kind != "root"]
    return Context(100 * matter / tokens, 100 * sum(not f.cross for f in told) / len(told))


def merge(parts: list[Scores]) -> Scores:
    """Several seeds' scores as one, each context still its own."""
    merged = Scores()
    for part in parts:
        base = max(merged.contexts, default=-1) + 1
        merged.asked += part.asked
        merged.contexts += [base + c for c in part.contexts]
        for way, ok in part.ways.items():
            merged.ways.setdefault(way, []).extend(ok)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=sorted(MODELS.glob("*/")))
    parser.add_argument("--contexts", type=int, default=25, help="of each seed")
    parser.add_argument("--seeds", type=int, default=4)
    given = parser.parse_args()
    known = describe()
    results = {}
    for folder in given.models:
        began = time.monotonic()
        model = load(folder)
        parts = [study(model, seed, given.contexts) for seed in range(1, given.seeds + 1)]
        scores = merge(parts)
        lines = acceptance(scores, known)
        asked = len(scores.asked)
        print(f"\n{folder.name}: {max(scores.contexts) + 1} contexts, {asked} questions")
        for line in lines:
            print(
                f"  {'holds ' if line.holds else 'FAILS '} {line.demand}\n          {line.numbers}"
            )
        shown = tells(model, make_batches(9, 40))
        told = " / ".join(f"{share:.0f}" for share in shown)
        print(f"  deviation tells the tokens that matter, by layer (50 nothing, 100 all): {told}")
        by_seed = ", ".join(f"{p.share('full', cross):.1f}" for p in parts)
        print(f"  full prefill on cross questions by seed: {by_seed}")
        print(f"  {'':30s} cross  control")
        for way in scores.ways:
            print(
                f"  {way:30s} {scores.share(way, cross):5.1f}    {scores.share(way, control):5.1f}"
            )
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
        results[folder.name] = {
            "acceptance": [vars(line) for line in lines],
            "tells": shown,
            "ways": {
                way: {
                    "cross": scores.share(way, cross),
                    "cross interval": scores.interval(way, cross),
                    "control": scores.share(way, control),
                }
                for way in scores.ways
            },
        }
    print(save("quality", {"models": results}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
