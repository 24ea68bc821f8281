"""A mean over questions, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval, by drawing the questions anew (bootstrap, percentiles)."""

    mean: float
    low: float
    high: float


def estimate(parts: Sequence[float], wholes: Sequence[float] | None = None) -> Estimate:
    """The mean of `parts` over questions; with `wholes`, the sum of one over that of the other.

    Args:
        parts, wholes: one number for each question, at least one.
    """
    above = np.asarray(parts, dtype=float)
    below = np.ones_like(above) if wholes is None else np.asarray(wholes, dtype=float)
    drawn = np.random.default_rng(0).integers(len(above), size=(DRAWS, len(above)))
    means = above[drawn].sum(1) / np.maximum(below[drawn].sum(1), 1e-12)
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(float(above.sum() / max(below.sum(), 1e-12)), float(low), float(high))
