"""A model in bfloat16 on a CPU without instructions for it is said to be slow, and what to do."""

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
    ("machine", "capabilities", "fast"),
    [
        ("x86_64", {"avx2"}, False),
        ("x86_64", {"avx2", "avx512_f", "avx512_vnni"}, False),
        ("x86_64", {"avx2", "avx512_f", "avx512_bf16"}, True),
        ("x86_64", {"avx2", "amx_bf16"}, True),
        ("aarch64", set(), True),
    ],
)
def test_by_processor(
    monkeypatch: pytest.MonkeyPatch, reader: Path, machine: str, capabilities: set[str], fast: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
    assert fast_dtype() == ("auto" if fast else "float32")
    assert told(reader, "float32") is None
    assert ("dtype=float32" in (told(reader, "bfloat16") or "")) is not fast
    found = list(check_dtype(str(reader), {"dtype": "bfloat16"}))
    assert [one.status for one in found] == ([] if fast else ["warn"])
    assert all("bfloat16" in one.message and "float32" in one.fix for one in found)


def test_what_does_not_start_is_left_to_other_checks(tmp_path: Path) -> None:
    assert list(check_dtype(str(tmp_path / "nowhere"), {})) == []
