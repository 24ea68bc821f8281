"""Options are checked, and say what can be used."""

from __future__ import annotations

from typing import Any

import pytest

from semkv_rag.errors import OptionError
from semkv_rag.tiers import TierOptions


@pytest.mark.parametrize(
    "values",
    [
        {"reuse": "answers"},
        {"threshold": 1.5},
        {"threshold": True},
        {"threshold": float("nan")},
        {"thresholds": {"vision": -2}},
        {"top_k": 0},
        {"top_k": 2.0},
        {"delta": 0.0},
        {"delta": 1},
        {"capture_after": 0},
        {"capture_longer_than": -1},
        {"capture_bytes": -1},
    ],
)
def test_values_that_cannot_be_used(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(OptionError, match=rf"{name}.* use "):
        TierOptions(**values)


def test_thresholds_of_layers() -> None:
    options = TierOptions(threshold=0.8, thresholds={"vision": 0.95})
    assert (options.threshold_of("vision"), options.threshold_of("semantic")) == (0.95, 0.8)
