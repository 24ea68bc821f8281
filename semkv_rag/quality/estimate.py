"""Means over questions, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval, by drawing the questions anew (bootstrap, percentiles)."""

    mean: float
    low: float
    high: float


def estimate(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """The sum of `parts` over questions, over that of `wholes`.

    Args:
        parts, wholes: one number for each question, at least one.
    """
    above, below = np.asarray(parts, dtype=float), np.asarray(wholes, dtype=float)
    return _estimate(_ratio(above, below), above, below)


def share(parts: Sequence[float], wholes: Sequence[float] | None = None) -> Estimate:
    """The same of parts that are between 0 and their whole; 1 is the whole unless they are given.

    To the questions that are drawn come two more of middling size, one with all of its whole and one
    with nothing. Else a few questions that agree would leave no doubt at all. (So do Agresti and Coull,
    The American Statistician 52, 1998, to shares of yes and no.)
    """
    above = np.asarray(parts, dtype=float)
    below = np.ones_like(above) if wholes is None else np.asarray(wholes, dtype=float)
    middling = below.mean()
    drawn = np.append(above, (middling, 0.0)), np.append(below, (middling, middling))
    return _estimate(_ratio(above, below), *drawn)


def _estimate(mean: float, above: NDArray[np.float64], below: NDArray[np.float64]) -> Estimate:
    drawn = np.random.default_rng(0).integers(len(above), size=(DRAWS, len(above)))
    means = above[drawn].sum(1) / np.maximum(below[drawn].sum(1), 1e-12)
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(mean, min(float(low), mean), max(float(high), mean))


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    return float(above.sum() / max(below.sum(), 1e-12))
