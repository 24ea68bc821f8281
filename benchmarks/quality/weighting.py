"""How a deviation at an early check layer should weigh the question's attention.

    python -m benchmarks.quality.weighting [--models FOLDER ...] [--contexts 12]

Every way computes the layers up to its check layer for all tokens and picks by attention times a weight.
Told are cross questions answered right, per cent: prompts with one question, and with three at once; with
15 % of the tokens picked, and at 15 and 20 % charged as in a model of 32 layers. The contexts, of four
seeds, are none that the table is measured on.

Writes build/bench/quality_weighting.json. About four minutes of one free core for a model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.quality.export import MODELS, load
from benchmarks.quality.network import Model
from benchmarks.quality.precomputed import fresh, precompute
from benchmarks.quality.questions import make_contexts, several, single
from benchmarks.quality.reuse import KV
from benchmarks.quality.ways import Case, Ours, Way
from semkv_rag.blend import BlendShape, pick, smoothed

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (41, 42, 43, 44)
LAYERS = 32
Weight = Callable[[Tensor], Tensor]
"""Takes squared deviations and gives weights, both [candidates]."""


def doubted(doubt: float) -> Weight:
    """The norm of the deviation, and `doubt` times the mean norm."""
    return lambda squared: squared.sqrt() + doubt * squared.sqrt().mean()


WEIGHTS: dict[str, Weight] = {
    "attention alone": torch.ones_like,
    "squared deviation": lambda squared: squared,
    "its norm": torch.sqrt,
    "norm + mean": doubted(1),
    "norm + 2 means": doubted(2),
    "norm + 4 means": doubted(4),
}
CHECKS = (1, 2, 3)
POINTS: dict[str, tuple[float, bool]] = {
    "15 % picked": (0.15, False),
    "15 % charged": (0.15, True),
    "20 % charged": (0.2, True),
}


@dataclass(frozen=True)
class Weighted(Way):
    """Attention times a weight, at a check layer."""

    weight: str
    check: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.weight}, layer {self.check}"

    @property
    def _like(self) -> Ours:
        return Ours("deviation_x_attention", self.check)

    def charged(self, ratio: float, shape: BlendShape) -> float:
        return self._like.charged(ratio, shape)

    def ratio(self, charged: float, shape: BlendShape) -> float | None:
        return self._like.ratio(charged, shape)

    def cache(self, case: Case, ratios: list[float]) -> KV:
        deviations = case.deviation(self._like.selector, self.check)
        picked = []
        for index, attention in enumerate(case.attention):
            row = index // case.prompts
            at = case.stored.candidates(row)
            scores = smoothed(attention[1:].mean(0), case.stored.ranks(row))
            scores = scores * WEIGHTS[self.weight](deviations[row])
            picked.append(at[pick(scores, round(ratios[row] * len(at)))])
        return case.blended(picked, self.check)


def measure(model: Model, contexts: int) -> dict[str, dict[str, dict[str, float]]]:
    """Per cent right, by `one` or `three` questions, way and point; a point out of reach is left out."""
    right: dict[tuple[str, str, str], list[bool]] = {}
    for seed in SEEDS:
        made = make_contexts(seed, contexts)
        asked = {"one": single(made, seed, 4, 0), "three": several(made, seed)}
        known = fresh(model, asked["one"].contexts)
        for kind, prompts in asked.items():
            case = Case(model, prompts, known, precompute(model, prompts.contexts, "alone"))
            cross = [fact.cross for facts in prompts.facts for fact in facts]
            for way in (Weighted(weight, check) for check in CHECKS for weight in WEIGHTS):
                for point, (share, charged) in POINTS.items():
                    ratios = [
                        way.ratio(share, case.shape(row, LAYERS)) if charged else share
                        for row in range(contexts)
                    ]
                    found = [ratio for ratio in ratios if ratio is not None]
                    if len(found) == contexts:
                        answers = case.answer(way.cache(case, found))
                        right.setdefault((kind, way.name, point), []).extend(
                            ok for ok, needs in zip(answers, cross, strict=True) if needs
                        )
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, name, point), answers in right.items():
        shares.setdefault(kind, {}).setdefault(name, {})[point] = round(
            100 * sum(answers) / len(answers), 1
        )
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=sorted(MODELS.glob("*/")))
    parser.add_argument("--contexts", type=int, default=12, help="of each seed")
    given = parser.parse_args()
    results = {}
    for folder in given.models:
        results[folder.name] = measure(load(folder), given.contexts)
        print(f"\n{folder.name}: {' / '.join(POINTS)}; one question, three at once")
        for name in results[folder.name]["one"]:
            told = [
                " / ".join(
                    f"{by[name][point]:5.1f}" if point in by.get(name, {}) else "    -"
                    for point in POINTS
                )
                for by in (results[folder.name][kind] for kind in ("one", "three"))
            ]
            print(f"  {name:28s} {told[0]}    {told[1]}", flush=True)
    out = ROOT / "build" / "bench" / "quality_weighting.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
