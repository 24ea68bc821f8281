"""examples/own_questions.py: what it prints, on the session's engine."""

from __future__ import annotations

import re

import pytest
from own_questions import show

from semkv_rag.config import PRESETS
from semkv_rag.engine import Engine


def test_what_the_example_prints(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    show(engine, questions=3)
    *lines, full, advised, _ = capsys.readouterr().out.splitlines()
    names = [line.partition(":")[0] for line in lines]
    assert names == ["as stored", *PRESETS, "query_attention 10 %"]
    assert all(
        re.search(r": [\d.]+ % equal tokens, F1 [\d.]+, charged \d+ %$", line) for line in lines
    )
    assert lines[names.index("exact")].startswith("exact: 100.0 % equal tokens")
    assert full == "full prefill: F1 100.0"
    assert advised.startswith("recommended: ")
