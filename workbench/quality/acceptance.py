"""What a yardstick must show before it is believed, with the numbers it shows."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.quality import grammar
from workbench.quality.batches import Asked
from workbench.quality.study import BLIND, SELECTORS, Filter, Scores, control, cross

CHECK = 1
"""The check layer of the published method."""
_GRADED = (5, 10, 15, 20, 30)
_TASKS: tuple[grammar.Kind, ...] = ("chain", "coreference", "list")


@dataclass(frozen=True)
class Line:
    """One demand, whether it holds, and the numbers it is judged by."""

    demand: str
    holds: bool
    numbers: str


@dataclass(frozen=True)
class Context:
    """What is known of the contexts themselves: tokens that matter, and references within a chunk, in per
    cent."""

    matter: float
    inside: float


def acceptance(scores: Scores, known: Context) -> list[Line]:
    """The list. Intervals are 95 %, by context; differences are taken question by question."""
    best = {r: max(SELECTORS, key=lambda way: scores.share(f"{way} {r}", cross)) for r in _GRADED}
    return [
        _full(scores),
        _documents(scores),
        _difference(
            "chunks reused: cross questions fall by at least 25", scores, "chunks", cross, low=25
        ),
        _difference("chunks reused: controls hold (±2)", scores, "chunks", control, within=2),
        _difference(
            f"layers 0 to {CHECK} fresh, nothing picked: still at least 15 below full",
            scores,
            f"fresh to {CHECK}",
            cross,
            low=15,
        ),
        _depth(scores),
        _matter(known),
        _graded(scores, best),
        _blind(scores, best),
    ]


def _span(interval: tuple[float, float]) -> str:
    return f"[{interval[0]:.1f}, {interval[1]:.1f}]"


def _full(scores: Scores) -> Line:
    parts: list[tuple[str, Filter]] = [("cross", cross), ("controls", control)]
    parts += [(task, lambda a, task=task: a.fact.kind == task) for task in _TASKS]  # type: ignore[misc]
    shares = [scores.share("full", which) for _, which in parts]
    told = ", ".join(
        f"{name} {share:.1f} {_span(scores.interval('full', which))}"
        for (name, which), share in zip(parts, shares, strict=True)
    )
    return Line("full prefill on names never trained on: at least 97", min(shares) >= 97, told)


def _documents(scores: Scores) -> Line:
    def everything(_: Asked) -> bool:
        return True

    return _difference(
        "whole documents reused: as full (±2)", scores, "documents", everything, within=2
    )


def _difference(
    demand: str,
    scores: Scores,
    way: str,
    which: Filter,
    *,
    low: float | None = None,
    within: float | None = None,
) -> Line:
    loss = scores.share("full", which) - scores.share(way, which)
    above, below = scores.interval(way, which, less="full")
    holds = (low is None or loss >= low) and (within is None or abs(loss) <= within)
    return Line(
        demand,
        holds,
        f"{scores.share(way, which):.1f}, a loss of {loss:.1f} {_span((-below, -above))}",
    )


def _depth(scores: Scores) -> Line:
    """Over several selectors: one that looks at layer 3 finds the first two references' tokens alike."""
    told, mean = [], [0.0, 0.0, 0.0]
    ways = [f"{selector} {ratio}" for selector in SELECTORS for ratio in (10, 20)]
    for way in ways:
        losses = []
        for depth in (1, 2, 3):

            def at(asked: Asked, depth: int = depth) -> bool:
                return asked.fact.cross and asked.fact.depth == depth

            losses.append(scores.share("full", at) - scores.share(way, at))
        mean = [total + loss / len(ways) for total, loss in zip(mean, losses, strict=True)]
        told.append(f"{way}: " + " / ".join(f"{loss:.1f}" for loss in losses))
    middle = " / ".join(f"{loss:.1f}" for loss in mean)
    return Line(
        "the loss grows with the chain's depth (1 / 2 / 3), on average over HKVD at 10 and 20 %",
        mean[0] < mean[1] < mean[2],
        f"{middle}; " + "; ".join(told),
    )


def _matter(known: Context) -> Line:
    return Line(
        "15 to 25 % of the tokens matter",
        15 <= known.matter <= 25,
        f"{known.matter:.1f} %; {known.inside:.1f} % of the references stay inside their chunk",
    )


def _graded(scores: Scores, best: dict[int, str]) -> Line:
    shares = [scores.share(f"{best[r]} {r}", cross) for r in _GRADED]
    full = scores.share("full", cross)
    graded = shares[0] < shares[1] < shares[2] and shares[1] < full - 5
    told = ", ".join(
        f"{r} % {share:.1f} {_span(scores.interval(f'{best[r]} {r}', cross))} ({best[r]})"
        for r, share in zip(_GRADED, shares, strict=True)
    )
    return Line(
        "accuracy is graded by ratio: 5 < 10 < 15 %, and more than 5 below full at 10 %",
        graded,
        told,
    )


def _blind(scores: Scores, best: dict[int, str]) -> Line:
    told, holds = [], True
    for ratio in _GRADED:
        blind = max(BLIND, key=lambda way: scores.share(f"{way} {ratio}", cross))
        share = scores.share(f"{blind} {ratio}", cross)
        gap = scores.share(f"{best[ratio]} {ratio}", cross) - share
        holds = holds and gap >= 10
        told.append(f"{ratio} % {share:.1f} ({blind}), {gap:.1f} behind")
    return Line(
        "no rule by token id or position within 10 of the best selector, at any ratio",
        holds,
        ", ".join(told),
    )
