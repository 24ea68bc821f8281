"""Whether a stored entry may answer for a prompt this similar: learned from what it did before.

The rule is vCache's (arXiv 2502.03771, the decision function of its section on the verified cache).
Each entry has its own curve of the chance to be right over the similarity s, a sigmoid with a
threshold t and a slope γ. From the outcomes the lowest p that the curve may have at s is taken, and
the entry *explores* (the answer is computed, and its outcome recorded) with probability at least

    τ = 1 - δ' / (1 - p)            so that   (1 - τ) (1 - p) ≤ δ'

and serves otherwise. Where this departs from the paper it is to have a bound that holds:

* The paper takes p from an asymptotic band around the fitted (t, γ), and reads a new band after each
  outcome. Here the band is a confidence sequence by the method of mixtures: with a prior w over
  curves, ∫ L dw / L(true curve) is a martingale of mean 1, so by Ville's inequality the set
  {curve: L(curve) ≥ ε ∫ L dw} holds the true curve after *every* outcome at once, with probability
  at least 1 - ε, for few outcomes too and although what is explored depends on earlier outcomes.
* δ is split instead of multiplied: ε = δ/4 for the band to fail, δ' = (δ - ε) / (1 - ε) for a wrong
  answer while it holds. So a request is answered wrongly with probability at most ε + (1 - ε) δ' = δ.
* Curves have a ceiling 1 - λ and may fall as well as rise, p = (1 - λ) σ(γ (s - t)): noise at the top,
  and lookalikes that are more similar than paraphrases, are then curves like any other.
* Where the rule would serve less than one request in ten, none is served. That costs next to nothing,
  and holds wrong answers below 10 δ' of the *served* ones as well.

What must be true for it: the entry's curve is of this family (to the resolution of the grid below,
which is made up for by taking the worst of neighbouring points) and does not change over time, and
recorded outcomes are right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

# Single precision halves what a decision reads; of fits worth comparing it loses less than 0.01.
FloatArray = NDArray[np.float32]

_LEAST_SIMILARITY = 0.5  # less similar ones are not told apart, and never served
_STEP = 0.005
_POINTS = 101  # similarities 0.5 to 1
_SLOPES = (16.0, 32.0, 64.0, 128.0)
_THRESHOLDS = np.linspace(0.6, 1.1, 51)
_CEILING_GAPS = np.concatenate(([0.0], np.geomspace(1e-3, 0.8, 24)))
_CLIP = 1e-6  # no curve is so sure that one outcome rules it out
_BAND_SHARE = 0.25  # of delta
_LEAST_SERVED = 0.1


@dataclass(frozen=True)
class Outcome:
    """What came of one explored request.

    Attributes:
        similarity: the cosine similarity of the prompt and the entry, -1 to 1.
        correct: whether the entry's answer would have done.
    """

    similarity: float
    correct: bool


@dataclass(frozen=True)
class Decision:
    """Whether the entry serves.

    Attributes:
        serve: False means explore: compute the answer and record the outcome.
        probability: the least chance of being right that the outcomes leave possible, 0 to 1;
            0 when nothing is known.
        reason: in words.
    """

    serve: bool
    probability: float
    reason: str


def decide(
    outcomes: Iterable[Outcome], similarity: float, delta: float, rng: np.random.Generator
) -> Decision:
    """Explore or serve. Never raises: whatever goes wrong in here is a reason to explore.

    Args:
        outcomes: of this entry alone, in any order; of explored requests only.
        similarity: of the prompt at hand to the entry, -1 to 1.
        delta: the share of all requests to this entry that may be answered wrongly, above 0 and
            below 1.
        rng: drawn from at most once; the same generator state gives the same decision.
    """
    try:
        return _decide(outcomes, similarity, delta, rng)
    except Exception as error:
        return Decision(False, 0.0, f"the policy failed ({type(error).__name__}: {error})")


def _decide(
    outcomes: Iterable[Outcome], similarity: float, delta: float, rng: np.random.Generator
) -> Decision:
    if not 0.0 < delta < 1.0:
        raise ValueError(f"delta must lie between 0 and 1, not {delta}")
    right, wrong = _counts(outcomes)
    point = _point(similarity)
    if similarity < _LEAST_SIMILARITY:
        return Decision(False, 0.0, f"similarity {similarity:.3f} is below {_LEAST_SIMILARITY}")
    band_fails = _BAND_SHARE * delta
    bound = (delta - band_fails) / (1 - band_fails)
    least = _least_probability(right, wrong, point, band_fails)
    if not math.isfinite(least):
        raise ArithmeticError("the bound is not a number")
    served_share = 1.0 if least >= 1 - bound else bound / (1 - least)
    seen = f"{int(right.sum() + wrong.sum())} outcomes say at least {least:.3f} right"
    if served_share < _LEAST_SERVED:
        return Decision(False, least, f"explore: {seen}, too little for an error of {delta:g}")
    if rng.random() < served_share:
        return Decision(True, least, f"serve: {seen}; served with probability {served_share:.3f}")
    return Decision(False, least, f"explore: {seen}; served with probability {served_share:.3f}")


def _counts(outcomes: Iterable[Outcome]) -> tuple[FloatArray, FloatArray]:
    """Right and wrong outcomes at each point, [points] each."""
    right, wrong = np.zeros(_POINTS, np.float32), np.zeros(_POINTS, np.float32)
    for outcome in outcomes:
        if not isinstance(outcome.correct, bool | np.bool_):
            raise TypeError(f"an outcome is right or wrong, not {outcome.correct!r}")
        (right if outcome.correct else wrong)[_point(outcome.similarity)] += 1
    return right, wrong


def _point(similarity: float) -> int:
    # A cosine in single precision may be a little above 1.
    if not -1.001 <= similarity <= 1.001:
        raise ValueError(f"similarity must lie between -1 and 1, not {similarity}")
    point = round((similarity - _LEAST_SIMILARITY) / _STEP)
    return min(max(point, 0), _POINTS - 1)


def _least_probability(right: FloatArray, wrong: FloatArray, point: int, fails: float) -> float:
    """The lowest chance at `point` of all curves that the outcomes do not rule out."""
    family = _family()
    fit = (right @ family.log_right + wrong @ family.log_wrong).astype(np.float64)
    weighted = fit + family.log_prior
    top = weighted.max()
    mixture = top + math.log(np.exp(weighted - top).sum())
    possible = fit >= math.log(fails) + mixture
    # The neighbours on either side make up for thresholds between two points of the grid.
    near = family.chance[max(point - 1, 0) : point + 2, possible]
    return float(near.min())


@dataclass(frozen=True, eq=False)
class _Family:
    """Every curve of the grid.

    Attributes:
        log_right, log_wrong: [points, curves].
        log_prior: [curves].
        chance: [points, curves], each curve with the ceiling one step lower: true ceilings lie between
            two steps.
    """

    log_right: FloatArray
    log_wrong: FloatArray
    log_prior: FloatArray
    chance: FloatArray


@cache
def _family() -> _Family:
    points = _LEAST_SIMILARITY + _STEP * np.arange(_POINTS)
    distance = points - _THRESHOLDS[:, None]
    slopes = np.array([sign * slope for slope in _SLOPES for sign in (1, -1)])
    sloped = (1 / (1 + np.exp(-slopes[:, None, None] * distance))).reshape(-1, _POINTS)
    shapes = np.concatenate((np.ones((1, _POINTS)), sloped))  # the first does not depend on s
    lower = np.append(_CEILING_GAPS[1:], 1.0)
    curves = ((1 - _CEILING_GAPS)[:, None, None] * shapes).reshape(-1, _POINTS).T
    chance = ((1 - lower)[:, None, None] * shapes).reshape(-1, _POINTS).T
    clipped = np.clip(curves, _CLIP, 1 - _CLIP)
    # Any prior is valid. This one favours entries that are always right beyond some similarity.
    shape_prior = np.full(len(shapes), 0.5 / len(sloped))
    shape_prior[0] = 0.5
    gap_prior = np.full(len(_CEILING_GAPS), 0.5 / (len(_CEILING_GAPS) - 1))
    gap_prior[0] = 0.5
    log_prior = np.log(np.outer(gap_prior, shape_prior)).ravel()
    tables = (np.log(clipped), np.log1p(-clipped), log_prior, chance)
    return _Family(*(np.ascontiguousarray(table, dtype=np.float32) for table in tables))
