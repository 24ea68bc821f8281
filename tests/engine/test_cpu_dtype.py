"""A model in bfloat16 on a CPU without AVX-512 is said to be slow, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from semkv_rag.cli.checks import check_dtype
from semkv_rag.engine.cpu_dtype import fast_dtype, slow_dtype
from semkv_rag.engine.launch import engine_arguments, resolve


def told(model: Path, dtype: str) -> str | None:
    config, _ = resolve(engine_arguments(str(model), {"dtype": dtype}), None)
    return slow_dtype(config)


@pytest.mark.parametrize(
    ("machine", "capability", "fast"),
    [
        ("x86_64", "AVX2", False),
        ("x86_64", "DEFAULT", False),
        ("x86_64", "AVX512", True),
        ("aarch64", "DEFAULT", True),
    ],
)
def test_by_processor(
    monkeypatch: pytest.MonkeyPatch, reader: Path, machine: str, capability: str, fast: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert fast_dtype() == ("auto" if fast else "float32")
    assert told(reader, "float32") is None
    assert ("dtype=float32" in (told(reader, "bfloat16") or "")) is not fast
    found = list(check_dtype(str(reader), {"dtype": "bfloat16"}))
    assert [one.status for one in found] == ([] if fast else ["warn"])
    assert all("bfloat16" in one.message and "float32" in one.fix for one in found)


def test_what_does_not_start_is_left_to_other_checks(tmp_path: Path) -> None:
    assert list(check_dtype(str(tmp_path / "nowhere"), {})) == []
