"""The learned threshold: wrong answers stay under the bound, whatever the entry is like."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import beta

from semkv_rag.prompt_cache import PromptCacheOptions
from semkv_rag.prompt_cache.guard import Outcome, decide

Curve = Callable[[float], float]


def sigmoid(slope: float, threshold: float) -> Curve:
    return lambda s: 1 / (1 + math.exp(-slope * (s - threshold)))


CURVES: dict[str, Curve] = {
    "always right": lambda s: 1.0,
    "never right": lambda s: 0.0,
    "half right": lambda s: 0.5,
    "right but for noise": lambda s: 0.97,
    "steep": sigmoid(100, 0.9),
    "gentle": sigmoid(30, 0.85),
    "steep but for noise": lambda s: 0.99 * sigmoid(100, 0.88)(s),
    # Lookalikes are more similar than paraphrases.
    "falls": sigmoid(-80, 0.95),
    # Outside the family that the bound assumes:
    "wrong at the top and the bottom": lambda s: 0.999 if 0.85 < s < 0.95 else 0.3,
    "in steps": lambda s: 0.0 if s < 0.85 else 0.9 if s < 0.95 else 1.0,
}
REQUESTS = 600


def stream(curve: Curve, delta: float, seed: int, requests: int = REQUESTS) -> tuple[int, int]:
    """Wrong answers and served requests of one entry's life."""
    rng = np.random.default_rng(seed)
    outcomes: list[Outcome] = []
    wrong = served = 0
    for _ in range(requests):
        similarity = float(rng.uniform(0.8, 1.0))
        correct = bool(rng.random() < curve(similarity))
        if decide(outcomes, similarity, delta, rng).serve:
            served += 1
            wrong += not correct
        else:
            outcomes.append(Outcome(similarity, correct))
    return wrong, served


@pytest.mark.slow
@pytest.mark.parametrize(
    "delta",
    [
        PromptCacheOptions().delta,
        pytest.param(0.02, marks=pytest.mark.soak),
        pytest.param(0.05, marks=pytest.mark.soak),
    ],
)
def test_error_stays_under_the_bound(delta: float) -> None:
    """Of each kind of entry, and of all with 95 % confidence."""
    errors = {name: stream(curve, delta, seed) for seed, (name, curve) in enumerate(CURVES.items())}
    for name, (wrong, _) in errors.items():
        assert wrong <= delta * REQUESTS, name
    wrong = sum(found for found, _ in errors.values())
    of = REQUESTS * len(errors)
    assert beta.ppf(0.95, wrong + 1, of - wrong) <= delta


@pytest.mark.parametrize(("delta", "least"), [(0.01, 0.1), (0.02, 0.25), (0.05, 0.5)])
def test_a_good_entry_is_served(delta: float, least: float) -> None:
    _, served = stream(CURVES["always right"], delta, seed=3)
    assert served >= least * REQUESTS


def test_an_entry_that_is_right_from_some_similarity_on_is_served_there() -> None:
    _, served = stream(CURVES["steep"], 0.05, seed=3)
    assert served >= 0.05 * REQUESTS
    rng = np.random.default_rng(0)
    outcomes = [Outcome(s, s > 0.9) for s in rng.uniform(0.8, 1.0, 400).tolist()]
    assert not decide(outcomes, 0.85, 0.05, rng).serve
    assert decide(outcomes, 0.99, 0.05, rng).probability > 0.93


@pytest.mark.parametrize("name", ["never right", "half right"])
def test_a_bad_entry_is_never_served(name: str) -> None:
    assert stream(CURVES[name], 0.05, seed=4) == (0, 0)


def test_explores_without_outcomes() -> None:
    for seed in range(200):
        decision = decide([], 1.0, 0.05, np.random.default_rng(seed))
        assert not decision.serve


def test_same_generator_state_same_decision() -> None:
    outcomes = [Outcome(0.9, True)] * 150
    first = [decide(outcomes, 0.9, 0.05, np.random.default_rng(s)).serve for s in range(50)]
    again = [decide(outcomes, 0.9, 0.05, np.random.default_rng(s)).serve for s in range(50)]
    assert first == again
    assert len(set(first)) == 2


def test_more_right_outcomes_never_lower_the_probability() -> None:
    rng = np.random.default_rng(0)
    found = [decide([Outcome(0.9, True)] * n, 0.9, 0.05, rng).probability for n in (0, 10, 50, 500)]
    assert found == sorted(found)
    assert found[-1] > 0.97


def test_a_wrong_outcome_lowers_the_probability() -> None:
    rng = np.random.default_rng(0)
    right = [Outcome(0.95, True)] * 300
    without = decide(right, 0.95, 0.02, rng).probability
    assert decide([*right, Outcome(0.95, False)], 0.95, 0.02, rng).probability < without


GOOD = [Outcome(0.95, True)] * 5000


def test_the_faults_below_would_serve_without_the_fault() -> None:
    assert decide(GOOD, 0.95, 0.05, np.random.default_rng(0)).serve


@pytest.mark.parametrize(
    ("outcomes", "similarity", "delta"),
    [
        (GOOD, math.nan, 0.05),
        (GOOD, math.inf, 0.05),
        (GOOD, 1.5, 0.05),
        (GOOD, 0.2, 0.05),
        (GOOD, 0.95, math.nan),
        (GOOD, 0.95, 0.0),
        (GOOD, 0.95, 1.0),
        (GOOD, 0.95, -0.1),
        (GOOD, "0.95", 0.05),
        ([*GOOD, Outcome(math.nan, True)], 0.95, 0.05),
        ([*GOOD, Outcome(7.0, True)], 0.95, 0.05),
        ([*GOOD, Outcome(0.95, "yes")], 0.95, 0.05),  # type: ignore[arg-type]
        ([*GOOD, None], 0.95, 0.05),
        (None, 0.95, 0.05),
    ],
)
def test_fails_closed(outcomes: list[Outcome], similarity: float, delta: float) -> None:
    decision = decide(outcomes, similarity, delta, np.random.default_rng(0))
    assert not decision.serve
    assert decision.reason


def test_broken_generator_explores() -> None:
    assert not decide([Outcome(0.95, True)] * 100, 0.95, 0.05, None).serve  # type: ignore[arg-type]


def test_broken_fit_explores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "semkv_rag.prompt_cache.guard.policy._least_probability", lambda *_: math.nan
    )
    assert not decide(GOOD, 0.95, 0.05, np.random.default_rng(0)).serve
