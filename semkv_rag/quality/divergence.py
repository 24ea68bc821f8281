"""How far two next-token distributions are apart, when only the likeliest tokens of each are known.

vLLM tells the log-probabilities of the likeliest tokens, not of all. So what can be had is a lower bound
of the KL divergence: that of the two distributions with tokens put together wherever one of the two
does not tell them apart, which is never more than the whole (the log-sum inequality).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LogProbs = Mapping[int, float]
"""Log-probabilities of some tokens of one place, by token id."""


def divergence(full: LogProbs, other: LogProbs) -> float:
    """A lower bound of KL(full ‖ other) in nats; the very KL where both name every token.

    Args:
        full, other: the likeliest tokens of each, and at most one that is named for another reason.
    """
    both = full.keys() & other.keys()
    missing = full.keys() - both
    total = sum(_part(math.exp(full[token]), math.exp(other[token])) for token in both)
    rest = max(1 - sum(math.exp(full[token]) for token in both), 0.0)
    other_rest = max(1 - sum(math.exp(other[token]) for token in both), 0.0)
    if missing and rest > 0:
        # What `other` gives to the tokens that it does not name is not told, but it can't be more than
        # this; of what it may be, the share that brings both closest together is taken.
        mass = min(sum(math.exp(full[token]) for token in missing), rest)
        unnamed = max(1 - sum(map(math.exp, other.values())), 0.0)
        least = sorted(map(math.exp, other.values()))[
            :2
        ]  # the very least may not be of the likeliest
        most = min(unnamed, len(missing) * max(least, default=1.0))
        closest = min(most, mass / rest * other_rest)
        return max(total + _part(mass, closest) + _part(rest - mass, other_rest - closest), 0.0)
    return max(total + _part(rest, other_rest), 0.0)


def likeliest(place: LogProbs) -> int:
    """The token that greedy decoding takes; the smaller id among equals."""
    return min(place, key=lambda token: (-place[token], token))


_LEAST = 1e-12  # of a probability: below it float32's logarithms say nothing


def _part(p: float, q: float) -> float:
    return p * math.log(p / max(q, _LEAST)) if p > _LEAST else 0.0
