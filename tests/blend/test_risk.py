"""The expected loss of a blend, and how much has to be computed to keep it below a promise."""

from __future__ import annotations

import pytest
import torch

from semkv_rag.blend import expected_loss, left_share, needed, pick
from semkv_rag.blend.risk import LOSS, WORTH

WEIGHED = torch.tensor([0.5, 0.0, 0.3, 0.1, 0.05, 0.03, 0.01, 0.01, 0.0, 0.0])


def test_what_is_right_is_off_by_nothing() -> None:
    assert expected_loss(0.0, 3.0, 4000) == expected_loss(1.0, 0.0, 4000) == 0.0
    assert expected_loss(1.0, 1.0, 1000) == LOSS
    assert (
        expected_loss(0.5, 1.0, 400) < expected_loss(0.6, 1.0, 400) < expected_loss(0.6, 1.1, 400)
    )


def test_more_is_lost_in_longer_prompts() -> None:
    """Means that were seen on real models where `auto` stops are below what is expected, and not far."""
    assert expected_loss(1.0, 1.0, 4000) == pytest.approx(2 * LOSS)
    for share, change, tokens, seen in (
        (0.241, 0.93, 430, 0.0078),  # SmolLM2
        (0.245, 0.96, 2020, 0.0253),
        (0.135, 0.99, 2020, 0.0139),
        (0.180, 1.01, 3770, 0.0225),
        (0.102, 1.03, 3770, 0.0128),
        (0.247, 0.98, 430, 0.0049),  # Qwen2.5-Coder-0.5B
        (0.287, 1.23, 2050, 0.0259),
        (0.172, 1.24, 2050, 0.0135),
    ):
        assert seen <= expected_loss(share, change, tokens) <= 5 * seen


def test_what_stays_is_counted_by_what_is_asked_for() -> None:
    assert left_share(WEIGHED, torch.tensor([0, 2])) == pytest.approx(0.2)
    assert left_share(WEIGHED, torch.arange(0)) == 1.0
    assert left_share(WEIGHED, torch.arange(10)) == pytest.approx(0.0, abs=1e-6)
    assert left_share(torch.zeros(4), torch.arange(0)) == 0.0, (
        "nothing depends on what stood before"
    )


@pytest.mark.parametrize("change", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("promise", [0.0001, 0.002, 0.02])
def test_as_many_as_needed_and_not_one_more(change: float, promise: float) -> None:
    count = needed(WEIGHED, WEIGHED, change, promise)

    def loss(count: int) -> float:
        return expected_loss(left_share(WEIGHED, pick(WEIGHED, count)), change, len(WEIGHED))

    if count == len(WEIGHED):
        assert loss(int(WORTH * len(WEIGHED))) > promise
    else:
        assert loss(count) <= promise
        assert count == 1 or promise < loss(count - 1)


def test_a_promise_of_nothing_takes_all() -> None:
    assert needed(WEIGHED, WEIGHED, 1.0, 0.0) == len(WEIGHED)
    assert needed(torch.zeros(4), torch.zeros(4), 1.0, 0.0) == 4
