"""The ways that are compared, by name. In names `head` is the prompt prefix, for older files' sake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial

import torch
from torch import Tensor

from benchmarks.quality_real import field
from benchmarks.quality_real.context import Context
from benchmarks.quality_real.outcome import Outcome
from benchmarks.quality_real.published import PUBLISHED, PublishedKVDeviation
from benchmarks.quality_real.ways import Stored, asked_score
from semkv_rag.config import PRESETS, ReuseOptions
from workbench.results_study import BASE

NOTHING = torch.zeros(0, dtype=torch.int64)
CHARGES = (0.05, 0.1, 0.15, 0.2)
RATIOS = (0.17, 0.25, 0.32, 0.4, 0.5)

Way = Callable[["Compared"], Outcome | None]


class Compared:
    """A context's chunks in every way they are stored, made when a way first asks for them."""

    def __init__(self, context: Context) -> None:
        self.context = context

    @cached_property
    def alone(self) -> Stored:
        """Behind the prompt prefix."""
        return Stored(self.context, self.context.stored("prefix"), exact_first=True)

    @cached_property
    def both(self) -> Stored:
        """As in the product: behind the document, the prompt's first chunk behind the prefix."""
        return Stored(self.context, self.context.stored("left"), exact_first=True)

    @cached_property
    def left_only(self) -> Stored:
        """All behind the document, the prompt's first chunk too."""
        return Stored(self.context, self.context.stored("left"), exact_first=False)

    @cached_property
    def sensitivity(self) -> Tensor:
        """[layers, candidates]."""
        return self.both.change(self.alone.cache)

    @cached_property
    def scores(self) -> Tensor:
        """The default selector's, [candidates]."""
        return asked_score(self.both, "sensitivity_attention", self.sensitivity)

    @cached_property
    def weighed(self) -> Tensor:
        """Attention times sensitivity, [layers, candidates]."""
        return self.both.looked[0] * self.sensitivity

    def picked(self, ratio: float) -> Outcome:
        """The default selector at a ratio."""
        return self.both.scored(self.scores, ratio, self.both.looked[2], self.weighed)

    def preset(self, name: str) -> Outcome:
        """The default selector at a preset's ratio of so many candidates."""
        options = ReuseOptions.preset(name)
        return self.picked(options.ratio_of(len(self.both.candidates)))

    def charged(self, charge: float) -> Outcome:
        return self.picked(self.both.ratio_asked(charge))


def _published(name: str, charge: float, it: Compared) -> Outcome | None:
    ratio = it.alone.ratio_checked(charge)
    if ratio is None:
        return None
    return it.alone.checked(f"{name} {charge}", PUBLISHED[name](), ratio)


def _published_left(it: Compared) -> Outcome:
    ratio = it.both.ratio_checked(0.15) or 0.0
    return it.both.checked("left", PublishedKVDeviation(), ratio)


def _asked(it: Compared) -> Outcome:
    scores = asked_score(it.both, "query_attention")
    return it.both.scored(scores, it.both.ratio_asked(0.15), it.both.looked[2])


def _oracle(it: Compared) -> Outcome:
    attention, _, cost = it.both.looked
    true = (attention * it.both.change(it.context.full)).sum(0)
    return it.both.scored(true, it.both.ratio_asked(0.15), cost)


def _left_only(it: Compared) -> Outcome:
    stored = it.left_only
    scores = asked_score(stored, "sensitivity_attention", stored.change(it.alone.cache))
    return stored.scored(scores, stored.ratio_asked(0.15), stored.looked[2])


def _auto(preset: str, it: Compared) -> Outcome:
    return it.both.automatic(it.scores, PRESETS[preset].promise, it.both.looked[2], it.weighed)


def _at_ratio(ratio: float) -> str:
    return f"left: sensitivity_attention, ratio {ratio * 100:g} %"


def _ways() -> dict[str, Way]:
    ways: dict[str, Way] = {
        BASE: lambda it: it.alone.blended(NOTHING, 0),
        "left: as stored": lambda it: it.both.blended(NOTHING, 0),
        "exact": lambda it: it.both.blended(torch.arange(len(it.both.candidates)), 0),
    }
    for charge in CHARGES:
        share = f"{charge * 100:g} %"
        ways[f"left: sensitivity_attention, {share}"] = partial(
            lambda charge, it: it.charged(charge), charge
        )
        if charge < 0.2:
            for name in PUBLISHED:
                ways[f"head: {name}, {share}"] = partial(_published, name, charge)
    ways["left: kv_deviation_published, 15 %"] = _published_left
    ways["left: query_attention, 15 %"] = _asked
    ways["left: oracle, 15 %"] = _oracle
    ways["left only: sensitivity_attention, 15 %"] = _left_only
    for name in ("fast", "balanced"):
        ways[name] = partial(Compared.preset, name=name)
        ways[f"{name}, auto"] = partial(_auto, name)
    for ratio in RATIOS:
        ways[_at_ratio(ratio)] = partial(lambda ratio, it: it.picked(ratio), ratio)
    ways["left: chunk_head, 15 %"] = field.chunk_heads
    ways["left: first tokens, 15 %"] = field.first_tokens
    ways["left: one layer, 15 %"] = field.one_layer
    ways["left: two stages, 15 %"] = field.two_stages
    for length in field.LENGTHS:
        ways[f"left: stale keys x {length}, 15 %"] = partial(
            lambda length, it: field.tempered(it, length), length
        )
    return ways


WAYS: Mapping[str, Way] = _ways()
"""All by name. A way gives None where its charge is less than what it costs in any case."""
PRESET_WAYS = (BASE, "fast", "fast, auto", "balanced", "balanced, auto")
FIELD_WAYS = (
    BASE,
    "left: as stored",
    "left: sensitivity_attention, 15 %",
    "left: chunk_head, 15 %",
    "left: first tokens, 15 %",
    "left: one layer, 15 %",
    "left: two stages, 15 %",
    *(f"left: stale keys x {length}, 15 %" for length in field.LENGTHS),
    "left: oracle, 15 %",
)
STUDY_WAYS = tuple(
    name
    for name in WAYS
    if name not in {*PRESET_WAYS, *FIELD_WAYS[3:-1]} - {BASE} and ", ratio " not in name
)
LONG_WAYS = (
    BASE,
    "left: as stored",
    "left: sensitivity_attention, 15 %",
    "head: kv_deviation_published, 15 %",
    "head: k_deviation_published, 15 %",
    "left: oracle, 15 %",
    "fast",
    "balanced",
)
"""What is worth its time where a context takes minutes: `exact` takes another full prefill."""
RISK_WAYS = (BASE, *map(_at_ratio, RATIOS))
"""What the estimate of the loss is fitted to."""
SETS = {
    "study": STUDY_WAYS,
    "presets": PRESET_WAYS,
    "long": LONG_WAYS,
    "field": FIELD_WAYS,
    "risk": RISK_WAYS,
}


def outcomes(context: Context, names: tuple[str, ...]) -> dict[str, Outcome]:
    """What comes of each way that is possible."""
    it = Compared(context)
    made = {name: WAYS[name](it) for name in names}
    return {name: outcome for name, outcome in made.items() if outcome is not None}
