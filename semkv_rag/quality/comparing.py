"""One answer out of reused KV beside the one by full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semkv_rag.quality.divergence import LogProbs, divergence, likeliest


@dataclass(frozen=True, slots=True)
class Agreement:
    """How close an answer comes to the one by full prefill, place by place of the latter.

    In every place both have the same tokens before them, those of full prefill.

    Attributes:
        places: of the full prefill's answer, as far as they could be compared.
        equal: of them, those where the same token is the likeliest.
        first_difference: the first place of another token; None when the whole answer is the same.
        kl: the sum over the places of a lower bound of KL(full ‖ reused), in nats (`divergence`).
        first_kl: the same of the first place alone.
    """

    places: int
    equal: int
    first_difference: int | None
    kl: float
    first_kl: float


def first_difference(full: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two answers' tokens part, or None when they are the same."""
    for place, (one, two) in enumerate(zip(full, other, strict=False)):
        if one != two:
            return place
    return None if len(full) == len(other) else min(len(full), len(other))


def agreement(
    full: Sequence[int],
    full_places: Sequence[LogProbs],
    other: Sequence[int],
    other_places: Sequence[LogProbs],
    scored: Sequence[LogProbs | None] = (),
) -> Agreement:
    """Compare two answers, and behind their first difference what is told along the full prefill's.

    Args:
        full, other: the tokens of both answers.
        full_places, other_places: the log-probabilities in the place of each.
        scored: log-probabilities along the full prefill's answer (`Engine.score`); empty when both
            answers are the same. They are used from the first difference on.
    """
    parted = first_difference(full, other)
    places = [*other_places] if parted is None else [*other_places[: parted + 1]]
    along: list[LogProbs | None] = [*places, *scored[len(places) :]][: len(full)]
    told = [(place, at) for place, at in enumerate(along) if at is not None]
    apart = [divergence(full_places[place], at) for place, at in told]
    return Agreement(
        places=len(told),
        equal=sum(likeliest(at) == full[place] for place, at in told),
        first_difference=parted,
        kl=sum(apart),
        first_kl=apart[0] if apart else 0.0,
    )
