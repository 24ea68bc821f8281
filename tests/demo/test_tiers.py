"""examples/tiers.py: what it prints, on the session's engine."""

from __future__ import annotations

import re

import pytest
from tiers import show

from semkv_rag.engine import Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.tiered import tiered


def test_what_the_example_prints(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with tiered(engine, PromptCacheOptions(threshold=0.5)):
        show(engine)
    same, spaced, other = capsys.readouterr().out.splitlines()
    assert same.startswith("the same: otter; served by exact_text, similarity 1.0, ")
    assert spaced.startswith("with other white space: otter; served by exact_text, similarity 1.0")
    assert other.startswith("another question: deer; served by semantic_text, ")
    for line in (same, spaced, other):
        found = re.search(r"(\d+) of (\d+) tokens reused$", line)
        assert found is not None
        assert int(found[1]) >= 0.85 * int(found[2])
