"""The acceptance list fails what it should fail."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from workbench.quality import grammar
from workbench.quality.acceptance import Context, acceptance
from workbench.quality.batches import Asked
from workbench.quality.study import BLIND, RATIOS, SELECTORS, Scores, control, cross

KNOWN = Context(matter=18, inside=48)
Chance = Callable[[Asked], float]


def scores(**changed: Chance) -> Scores:
    """A good yardstick's scores by chance, but for the ways in `changed` (`_` for a blank)."""
    draw = random.Random(1)
    made = Scores()
    for index in range(30):
        context = grammar.make_context(draw, held=True)
        asked = [Asked(0, fact, 0) for fact in context.facts]
        made.asked += asked
        made.contexts += [index] * len(asked)
    ways: dict[str, Chance] = {
        "full": lambda _: 0.995,
        "documents": lambda _: 0.995,
        "chunks": lambda a: 0.05 if a.fact.cross else 0.995,
        "fresh to 1": lambda a: 0.3 if a.fact.cross else 0.995,
    }
    for ratio in RATIOS:
        per_cent = f"{100 * ratio:g}"
        good, poor = min(1.0, 0.05 + 5 * ratio), min(1.0, 0.05 + 2 * ratio)
        for selector in SELECTORS:
            ways[f"{selector} {per_cent}"] = lambda a, p=good: p ** (a.fact.depth or 1)  # type: ignore[misc]
        for rule in (*BLIND, "random"):
            ways[f"{rule} {per_cent}"] = lambda a, p=poor: p ** (a.fact.depth or 1)  # type: ignore[misc]
    ways |= {name.replace("_", " "): chance for name, chance in changed.items()}
    for way, chance in ways.items():
        made.ways[way] = [draw.random() < chance(a) for a in made.asked]
    return made


def failing(**changed: Chance) -> list[str]:
    return [line.demand for line in acceptance(scores(**changed), KNOWN) if not line.holds]


def test_a_good_yardstick_passes_all_but_the_lowest_ratio_of_blind_rules() -> None:
    assert [d for d in failing() if "token id" not in d] == []


@pytest.mark.parametrize(
    ("way", "chance", "named"),
    [
        ("full", lambda a: 0.9 if a.fact.kind == "list" else 1.0, "full prefill"),
        ("documents", lambda a: 0.9, "whole documents"),
        ("chunks", lambda a: 0.9, "fall by at least 25"),
        ("chunks", lambda a: 0.05 if a.fact.cross else 0.9, "controls hold"),
        ("fresh_to_1", lambda a: 0.9, "at least 15 below"),
        ("HKVD@1_10", lambda a: 0.99, "graded"),
        ("ends_10", lambda a: 0.5, "token id"),
    ],
)
def test_each_demand_can_fail(way: str, chance: Chance, named: str) -> None:
    assert any(named in demand for demand in failing(**{way: chance}))


def test_a_loss_that_does_not_grow_with_depth_fails() -> None:
    def better_when_deep(asked: Asked) -> float:
        return 0.2 + 0.2 * asked.fact.depth

    changed: dict[str, Chance] = {f"{s} {r}": better_when_deep for s in SELECTORS for r in (10, 20)}
    assert any("depth" in demand for demand in failing(**changed))


def test_shares_and_intervals() -> None:
    made = scores()
    assert made.share("full", control) > 98
    low, high = made.interval("chunks", cross, less="full")
    middle = made.share("chunks", cross) - made.share("full", cross)
    assert low < middle < high
    assert high - low < 8
