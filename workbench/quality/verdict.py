"""What the table says of the best selector and the published ones, with paired intervals by context."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from workbench.quality.study import Scores, cross

PUBLISHED = {
    "CacheBlend as published": "kv_deviation_published@1",
    "LMCache's K-only rule": "k_deviation_published@1",
}
_CHARGES = {"32": "charged as in 32 layers", "uncharged": "uncharged"}
_OTHERS = ("random", "chunk_head")
SHOWN = (
    "two_hop_attention",
    "query_attention",
    "deviation_weighted_attention@1",
    "plain_attention",
)
"""Told of beside the best, for what is recovered."""


def pooled(models: Mapping[str, Scores]) -> Scores:
    """All models' answers; a context is one, whoever read it."""
    first = next(iter(models.values()))
    merged = Scores()
    for scores in models.values():
        merged.asked += scores.asked
        merged.contexts += scores.contexts
    for way in first.ways:
        if all(way in scores.ways for scores in models.values()):
            merged.ways[way] = [ok for scores in models.values() for ok in scores.ways[way]]
    return merged


def lines(one: Mapping[str, Scores], several: Mapping[str, Scores]) -> list[str]:
    """The comparison for each model and for all of them, ready to be printed.

    Args:
        one, several: by model, the answers to prompts that ask one question, and several.
    """
    told = []
    both = [(name, scores, several[name]) for name, scores in one.items()]
    for name, scores, more in [*both, ("all models", pooled(one), pooled(several))]:
        told.append(f"{name}: cross questions over all tasks, chunks computed alone")
        told.append(
            f"  full prefill {scores.share('full', cross):.1f}, plain reuse "
            f"{scores.share('alone nothing', cross):.1f}"
        )
        for charge, words in _CHARGES.items():
            told += _against_published(scores, charge, words)
        for mode in ("alone", "left"):
            told += _recovered(scores, mode, f"computed {mode}")
            told += _recovered(more, mode, f"computed {mode}, several questions at once")
    return told


def _against_published(scores: Scores, charge: str, words: str) -> list[str]:
    told = []
    for ratio in (5, 10, 15, 20):
        best = _best(scores, "alone", charge, ratio)
        way = f"alone {best} {charge} {ratio}"
        parts = [f"{best} {scores.share(way, cross):.1f} {_span(scores.interval(way, cross))}"]
        for rule, selector in PUBLISHED.items():
            other = f"alone {selector} {charge} {ratio}"
            cannot = other not in scores.ways
            if cannot:  # what is left is plain reuse
                other = "alone nothing"
            gap = scores.share(way, cross) - scores.share(other, cross)
            span = _span(scores.interval(way, cross, less=other))
            against = f"{rule} (can't; plain reuse)" if cannot else rule
            parts.append(f"{gap:+.1f} {span} on {against} {scores.share(other, cross):.1f}")
        told.append(f"  {ratio} % {words}: " + "; ".join(parts))
    return told


def _best(scores: Scores, mode: str, charge: str, ratio: int) -> str:
    """The selector with the highest share, the published ones and the controls left out."""
    left_out = {*PUBLISHED.values(), *_OTHERS}
    able = [
        way
        for way in scores.ways
        if way.startswith(f"{mode} ")
        and way.endswith(f" {charge} {ratio}")
        and way.split()[1] not in left_out
    ]
    return max(able, key=lambda way: scores.share(way, cross)).split()[1]


def _recovered(scores: Scores, mode: str, words: str) -> list[str]:
    told = []
    for ratio, what, demand in ((15, "recovered of full - reuse", 90), (20, "of full", 98)):
        for selector in dict.fromkeys((_best(scores, mode, "32", ratio), *SHOWN)):
            way = f"{mode} {selector} 32 {ratio}"
            if way not in scores.ways:
                continue  # it is not measured behind every context
            less = f"{mode} nothing" if ratio == 15 else None
            middle, low, high = share_of_full(scores, way, less)
            met = "met" if middle >= demand else "NOT met"
            told.append(
                f"  {words}: {selector} at {ratio} % charged: {middle:.1f} "
                f"[{low:.1f}, {high:.1f}] % {what} (at least {demand}: {met})"
            )
    return told


def share_of_full(scores: Scores, way: str, less: str | None) -> tuple[float, float, float]:
    """(way - less) / (full - less) on cross questions in per cent, with its 95 % interval by context."""
    count = max(scores.contexts) + 1
    some, full, base = (_hits(scores, name, count) for name in (way, "full", less))
    draws = np.random.default_rng(0).integers(0, count, (2000, count))
    shares = (some - base)[draws].sum(1) / np.maximum((full - base)[draws].sum(1), 1)
    low, high = np.percentile(100 * shares, (2.5, 97.5))
    lost = (full - base).sum()
    middle = 100 * (some - base).sum() / lost if lost else float("nan")
    return float(middle), float(low), float(high)


def _hits(scores: Scores, way: str | None, count: int) -> NDArray[np.float64]:
    """Cross questions answered right, by context."""
    hits = np.zeros(count)
    if way is not None:
        for ok, asked, context in zip(scores.ways[way], scores.asked, scores.contexts, strict=True):
            hits[context] += ok and cross(asked)
    return hits


def _span(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.1f}, {interval[1]:.1f}]"
