"""How a deviation at an early check layer should weigh the question's attention.

    python -m workbench.quality.weighting [--models FOLDER ...] [--contexts 12]

Every way computes the layers up to its check layer for all tokens and picks by attention times a weight.
Told are cross questions answered right, per cent: prompts with one question, and with three at once; with
15 % of the tokens picked, and at 15 and 20 % charged as in a model of 32 layers. The contexts, of four
seeds, are none that the table is measured on.

Writes build/bench/quality_weighting.json and .png. About two minutes of one free core for a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from semkv_rag.blend import smoothed
from workbench.figures import save
from workbench.quality.export import MODELS, load
from workbench.quality.network import Model
from workbench.quality.precomputed import fresh, precompute
from workbench.quality.questions import make_contexts, several, single
from workbench.quality.study import Scores, cross
from workbench.quality.ways import Case, Ours, OwnScores, affordable

SEEDS = (41, 42, 43, 44)
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
POINTS: dict[str, tuple[float, int]] = {
    "15 % picked": (0.15, 0),
    "15 % charged": (0.15, 32),
    "20 % charged": (0.2, 32),
}
"""A ratio, and on a model of how many layers it is charged; 0: it is not."""


@dataclass(frozen=True)
class Weighted(OwnScores):
    """Attention times a weight, at a check layer."""

    weight: str
    check: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.weight}, layer {self.check}"

    @property
    def like(self) -> Ours:
        return Ours("deviation_x_attention", self.check)

    def scores(self, attention: Tensor, ranks: Tensor, deviation: Tensor | None) -> Tensor:
        assert deviation is not None
        return smoothed(attention[1:].mean(0), ranks) * WEIGHTS[self.weight](deviation)


WAYS = tuple(Weighted(weight, check) for check in CHECKS for weight in WEIGHTS)


def measure(model: Model, contexts: int) -> dict[str, Scores]:
    """Answers to prompts with `one` question and with `three`.

    Ways are `WAY, POINT`; a point that some context can't afford is left out.
    """
    found = {"one": Scores(), "three": Scores()}
    for number, seed in enumerate(SEEDS):
        made = make_contexts(seed, contexts)
        asked = {"one": single(made, seed, 4, 0), "three": several(made, seed)}
        known = fresh(model, asked["one"].contexts)
        for kind, prompts in asked.items():
            found[kind].note(prompts.facts, number * contexts)
            case = Case(model, prompts, known, precompute(model, prompts.contexts, "alone"))
            for way in WAYS:
                for point, (ratio, layers) in POINTS.items():
                    ratios = affordable(way, case, ratio, layers)
                    if ratios is not None:
                        answers = case.answer(way.cache(case, ratios))
                        found[kind].ways.setdefault(f"{way.name}, {point}", []).extend(answers)
    for scores in found.values():
        whole = len(scores.asked)
        scores.ways = {way: ok for way, ok in scores.ways.items() if len(ok) == whole}
    return found


def shares(scores: Scores) -> dict[str, dict[str, object]]:
    """By way: per cent of cross questions right, and its 95 % interval by context."""
    return {
        way: {
            "right": round(scores.share(way, cross), 1),
            "interval": [round(end, 1) for end in scores.interval(way, cross)],
        }
        for way in scores.ways
    }


def plot(models: Mapping[str, Mapping[str, Scores]]) -> Callable[[Any], None]:
    """Right answers at 15 % picked by weight, a line for each check layer, a panel for each model."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
        for axis, (name, found) in zip(axes, models.items(), strict=True):
            for check in CHECKS:
                for kind, style in (("one", "-"), ("three", "--")):
                    ways = [f"{Weighted(weight, check).name}, 15 % picked" for weight in WEIGHTS]
                    right = [found[kind].share(way, cross) for way in ways]
                    label = f"layer {check}, {kind} asked"
                    axis.plot(range(len(ways)), right, style, color=f"C{check}", label=label)
            axis.set_title(name, fontsize=10)
            axis.set_xticks(range(len(WEIGHTS)), WEIGHTS, rotation=60, ha="right", fontsize=8)
        axes[0].set_ylabel("cross questions right, %")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=sorted(MODELS.glob("*/")))
    parser.add_argument("--contexts", type=int, default=12, help="of each seed")
    given = parser.parse_args()
    results = {}
    for folder in given.models:
        found = results[folder.name] = measure(load(folder), given.contexts)
        print(f"\n{folder.name}: {' / '.join(POINTS)}; one question, three at once")
        for way in WAYS:
            told = [
                " / ".join(
                    f"{scores.share(f'{way.name}, {point}', cross):5.1f}"
                    if f"{way.name}, {point}" in scores.ways
                    else "    -"
                    for point in POINTS
                )
                for scores in found.values()
            ]
            print(f"  {way.name:28s} {told[0]}    {told[1]}", flush=True)
    models = {
        name: {kind: shares(scores) for kind, scores in found.items()}
        for name, found in results.items()
    }
    figures = {"contexts": given.contexts * len(SEEDS), "models": models}
    print(f"\n{save('quality_weighting', figures, plot(results))}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
