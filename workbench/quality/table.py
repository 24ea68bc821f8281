"""The table: selector by ratio by context at precompute time by task by depth, for each model.

    python -m workbench.quality.table [--models FOLDER ...] [--contexts 6] [--seeds 4] [--questions 6]

Ratios are charged (`semkv_rag.blend.charge`) in two ways: as on the yardstick's models, whose check
layer is one of 6, and as the same picks would cost in a model of 32 layers with the same check layer. To
compare with the published rules as their papers count, they are also left uncharged. Shares are per cent
of questions answered right as a whole, names never trained on, with 95 % intervals by context.

Writes build/bench/quality_table.json, quality_table.md, quality_table.png and quality_modes.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workbench.figures import save
from workbench.quality import table_plots, table_text, verdict
from workbench.quality.export import MODELS, load
from workbench.quality.network import Model
from workbench.quality.precomputed import MODES, Fresh, Mode, fresh, precompute
from workbench.quality.questions import Questions, make_contexts, several, single
from workbench.quality.study import Filter, Scores, control, cross
from workbench.quality.ways import Case, Ours, Plain, Way, affordable

RATIOS = (0, 2, 5, 10, 15, 20, 30, 50, 100)
"""Per cent."""
LAYERS = {"6": 6, "32": 32, "uncharged": 0}
"""How a ratio is charged, and on a model of how many layers."""
ROWS = 12
"""Contexts in a batch."""

EVERY: tuple[Way, ...] = (
    Ours("kv_deviation_published", 1),
    Ours("k_deviation_published", 1),
    Ours("kv_deviation", 1),
    Ours("kv_deviation", 2),
    Ours("kv_deviation", 3),
    Ours("kv_deviation_gradual", 1),
    Ours("kv_deviation_gradual", 2),
    Plain(),
    Plain(2),
    Plain(3),
    Ours("query_attention"),
    Ours("deviation_weighted_attention", 1),
    Ours("two_hop_attention"),
    Ours("deviation_x_attention", 1),
    Ours("deviation_x_attention", 2),
    Ours("deviation_x_attention", 3),
    Ours("chunk_head"),
    Ours("random"),
)
IN_EVERY_MODE = (
    "kv_deviation_published@1",
    "k_deviation_published@1",
    "kv_deviation@2",
    "query_attention",
    "deviation_weighted_attention@1",
    "two_hop_attention",
    "deviation_x_attention@2",
    "deviation_x_attention@3",
    "random",
)
"""Selectors that are measured behind other contexts than none, too."""


@dataclass
class Measured:
    """One model's answers.

    Attributes:
        scores: of prompts that ask one question, and of those that ask several. Ways are `full`,
            `MODE nothing` and `MODE SELECTOR LAYERS RATIO`.
        costs: by way: the mean uncharged and the mean charged ratio.
        cannot: of both, ways that cost more than their ratio, in some context, before they pick
            anything.
    """

    scores: dict[str, Scores] = field(
        default_factory=lambda: {"one": Scores(), "several": Scores()}
    )
    costs: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    cannot: dict[str, set[str]] = field(default_factory=lambda: {"one": set(), "several": set()})

    def cost(self, way: str) -> tuple[float, float]:
        """Mean uncharged and charged ratio, per cent."""
        each = self.costs[way]
        return tuple(100 * sum(c[i] for c in each) / len(each) for i in (0, 1))  # type: ignore[return-value]


def measure(model: Model, seeds: int, contexts: int, questions: int) -> Measured:
    """Everything, over `contexts` contexts of each seed."""
    found = Measured()
    for seed in range(1, seeds + 1):
        made = make_contexts(seed, contexts)
        for start in range(0, contexts, ROWS):
            some = made[start : start + ROWS]
            base = (seed - 1) * contexts + start
            controls = questions // 3
            asked = {
                "one": single(some, seed + start, questions - controls, controls),
                "several": several(some, seed + start),
            }
            known = fresh(model, asked["one"].contexts)
            for kind, prompts in asked.items():
                found.scores[kind].note(prompts.facts, base)
                _run(model, prompts, known, found, kind)
    for kind, ways in found.cannot.items():
        for way in ways:
            found.scores[kind].ways.pop(way, None)
    return found


def _run(model: Model, prompts: Questions, known: Fresh, found: Measured, kind: str) -> None:
    def note(way: str, ok: list[bool]) -> None:
        found.scores[kind].ways.setdefault(way, []).extend(ok)

    for mode in MODES:
        case = Case(model, prompts, known, precompute(model, prompts.contexts, mode))
        if mode == MODES[0]:
            note("full", case.answer(case.cached(known.kv)))
        note(f"{mode} nothing", case.answer(case.cached(case.stored.kv)))
        for selector in EVERY:
            if mode != MODES[0] and selector.name not in IN_EVERY_MODE:
                continue
            answered: dict[tuple[int, ...], list[bool]] = {}
            for charged, ratio in _points(mode, kind):
                way = f"{mode} {selector.name} {charged} {ratio}"
                layers = LAYERS[charged]
                ratios = affordable(selector, case, ratio / 100, layers)
                if ratios is None:
                    found.cannot[kind].add(way)
                    continue
                shapes = [case.shape(row, layers or 32) for row in range(case.contexts)]
                counts = tuple(
                    round(r * shape.reused) for r, shape in zip(ratios, shapes, strict=True)
                )
                if counts not in answered:
                    answered[counts] = case.answer(selector.cache(case, ratios))
                note(way, answered[counts])
                if kind == "one":
                    found.costs.setdefault(way, []).extend(
                        (r, selector.charged(r, shape))
                        for r, shape in zip(ratios, shapes, strict=True)
                    )


def _points(mode: Mode, kind: str) -> list[tuple[str, int]]:
    """How ratios are charged, and ratios, where that is worth its time: 0 and 100 % need no selector."""
    points = []
    for charged, layers in LAYERS.items():
        for ratio in RATIOS[1:-1]:
            if kind == "several" and (layers != 32 or ratio > 20):
                continue
            if layers == 0 and (mode != MODES[0] or ratio > 20):
                continue
            points.append((charged, ratio))
    return points


def filters() -> dict[str, Filter]:
    """The groups of questions that shares are told for."""
    groups: dict[str, Filter] = {"cross": cross, "control": control}
    for task in ("chain", "coreference", "list"):
        groups[task] = lambda a, task=task: a.fact.cross and a.fact.kind == task  # type: ignore[misc]
    for depth in (1, 2, 3):
        groups[f"depth {depth}"] = lambda a, depth=depth: a.fact.cross and a.fact.depth == depth  # type: ignore[misc]
    return groups


def figures(found: Measured) -> dict[str, object]:
    """One model's table as JSON values."""
    shares: dict[str, dict[str, object]] = {}
    for kind, scores in found.scores.items():
        for way in scores.ways:
            told = shares.setdefault(way, {})
            if kind == "several":
                told["several"] = round(scores.share(way, cross), 1)
                continue
            for name, which in filters().items():
                told[name] = round(scores.share(way, which), 1)
            told["cross interval"] = [round(each, 1) for each in scores.interval(way, cross)]
            if way in found.costs:  # not `full`, nor where nothing is recomputed
                told["uncharged"], told["charged"] = (round(c, 2) for c in found.cost(way))
    for way in found.cannot["one"]:
        shares[way] = {"cannot": True}
    return {
        "contexts": max(found.scores["one"].contexts) + 1,
        "questions": len(found.scores["one"].asked),
        "cross questions": sum(map(cross, found.scores["one"].asked)),
        "ways": shares,
    }


def show(name: str, found: Measured) -> None:
    """Print the table of cross questions."""
    scores = found.scores["one"]
    print(f"\n{name}: {max(scores.contexts) + 1} contexts, {len(scores.asked)} questions")
    print(f"  full prefill: cross {scores.share('full', cross):.1f}, several at once "
          f"{found.scores['several'].share('full', cross):.1f}")  # fmt: skip
    for mode in MODES:
        nothing = f"{mode} nothing"
        print(f"  {mode}: nothing recomputed, cross {scores.share(nothing, cross):.1f}, controls "
              f"{scores.share(nothing, control):.1f}")  # fmt: skip
        for layers in LAYERS:
            print(f"    {layers + (' layers' if LAYERS[layers] else ''):28s}"
                  + "".join(f"{ratio:7d}" for ratio in RATIOS[1:-1]))  # fmt: skip
            for selector in EVERY:
                ways = [f"{mode} {selector.name} {layers} {ratio}" for ratio in RATIOS[1:-1]]
                if any(way in scores.ways for way in ways):
                    told = (f"{scores.share(way, cross):7.1f}" if way in scores.ways else "      -"
                            for way in ways)  # fmt: skip
                    print(f"      {selector.name:26s}" + "".join(told), flush=True)


def mean_uncharged(models: Iterable[Measured]) -> dict[str, float]:
    """By way, the mean uncharged ratio over all models, per cent."""
    costs: dict[str, list[float]] = {}
    for found in models:
        for way in found.costs:
            costs.setdefault(way, []).append(found.cost(way)[0])
    return {way: sum(each) / len(each) for way, each in costs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, nargs="*", default=sorted(MODELS.glob("*/")))
    parser.add_argument("--contexts", type=int, default=6, help="of each seed")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument(
        "--questions", type=int, default=6, help="of each context, a third controls"
    )
    given = parser.parse_args(arguments)
    measured = {}
    for folder in given.models:
        began = time.monotonic()
        measured[folder.name] = measure(load(folder), given.seeds, given.contexts, given.questions)
        show(folder.name, measured[folder.name])
        print(f"  {time.monotonic() - began:.0f} s", flush=True)
    one, several_ = (
        {name: found.scores[kind] for name, found in measured.items()}
        for kind in ("one", "several")
    )
    lines = verdict.lines(one, several_)
    print("\n" + "\n".join(lines))
    told = {name: figures(found) for name, found in measured.items()}
    save("quality_table", {"models": told, "verdict": lines}, table_plots.frontier(told))
    path = save("quality_modes", {"models": sorted(told)}, table_plots.modes(told))
    text = table_text.tables(
        one, several_, mean_uncharged(measured.values()), [way.name for way in EVERY], filters()
    )
    path.with_name("quality_table.md").write_text(text)
    print(f"\n{path.with_name('quality_table.json')}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
