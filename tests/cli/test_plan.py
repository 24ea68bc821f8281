"""`semkv plan`: by a data sheet, by a file, by measuring."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Semkv


def found(*lengths: int) -> dict[str, Any]:
    """What `semkv doctor --deep --out` writes, as far as a plan reads it."""
    results: list[dict[str, Any]] = [{"check": "layout", "case": "4 layers", "figures": {}}]
    for length in lengths:
        figures = {
            "plain_ms": length * 0.5,
            "blend_ms": length * 0.1 + 20,
            "load_ms": length * 0.01,
            "charged_ratio": 0.2,
        }
        results.append({"check": "ttft", "case": f"{length:,} tokens", "figures": figures})
    results.append({"check": "ttft", "case": "8,000 tokens", "figures": {}})
    return {"findings": [], "deep": {"results": results}}


def test_by_a_data_sheet(semkv: Semkv, tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("qwen3")
    plan = semkv(
        "plan", "--model", model, "--gpu", "L4", "--corpus-tokens", "2M", "--context", "left",
        "--prompt-tokens", 500, "--json",
    ).data  # fmt: skip
    assert plan["measured"] is False
    assert plan["store_bytes"] == 2_000_000 * plan["kv_bytes_per_token"]
    assert [one["tokens"] for one in plan["prompts"]] == [500]
    told = semkv("plan", "--model", model, "--gpu", "L4", "--corpus-tokens", "2M")
    assert told.code == 0
    assert "by its data sheet" in told.out
    assert "32,000" in told.out


def test_by_what_the_doctor_measured(
    semkv: Semkv, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps(found(1000, 4000)))
    arguments = ("plan", "--model", tiny_model("qwen3"), "--measured", path, "--storage", "100")
    plan = semkv(*arguments, "--prompt-tokens", 2000, "--json").data
    assert plan["measured"] is True
    assert plan["prompts"][0]["plain_ms"] == pytest.approx(1000)
    path.write_text(json.dumps(found(1000)))
    refused = semkv(*arguments)
    assert refused.code == 2
    assert "two lengths" in refused.err


@pytest.mark.parametrize("content", [None, "[]", "no JSON", '{"deep": null}'])
def test_files_of_another_kind(
    semkv: Semkv, tiny_model: Callable[[str], Path], tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "found.json"
    if content is not None:
        path.write_text(content)
    refused = semkv("plan", "--model", tiny_model("qwen3"), "--measured", path)
    assert refused.code == 2
    assert str(path) in refused.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--gpu", "L4", "--measure"],
        ["--gpu", "abacus"],
        ["--gpu", "L4", "--storage", "tape"],
        ["--gpu", "L4", "--corpus-tokens", "many"],
        ["--gpu", "L4", "--context", "above"],
    ],
)
def test_what_it_does_not_understand(
    semkv: Semkv, tiny_model: Callable[[str], Path], arguments: list[str]
) -> None:
    refused = semkv("plan", "--model", tiny_model("qwen3"), *arguments)
    assert refused.code == 2
    assert refused.err.startswith("semkv: ")


@pytest.mark.engine
def test_by_measuring(semkv: Semkv, tiny_model: Callable[[str], Path]) -> None:
    arguments = ("dtype=float32", "max_model_len=1200", "kv_cache_memory_bytes=134217728")
    engine_args = [f"--engine-arg={argument}" for argument in arguments]
    outcome = semkv(
        "plan", "--model", tiny_model("qwen3"), "--measure", *engine_args, "--prompt-tokens", 3000,
        "--corpus-tokens", "1M", "--json",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    plan = outcome.data
    assert plan["measured"] is True
    assert plan["precompute_hours"] > 0
    assert plan["prompts"][0]["plain_ms"] > 0
    assert "stored, plain, blended" in outcome.err, "a line for each step, as this is no terminal"


def test_bytes_follow_the_codec(semkv: Semkv, tiny_model: Callable[[str], Path]) -> None:
    arguments = ("plan", "--model", tiny_model("qwen3"), "--gpu", "L4", "--corpus-tokens", "2M")
    plain = semkv(*arguments, "--engine-arg", "dtype=bfloat16", "--json").data
    small = semkv(*arguments, "--engine-arg", "dtype=bfloat16", "--codec", "int8", "--json").data
    assert small["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    assert 0.5 < small["store_bytes"] / plain["store_bytes"] < 0.65
    assert small["prompts"][0]["load_ms"] < 0.65 * plain["prompts"][0]["load_ms"]
    refused = semkv(*arguments, "--codec", "int3")
    assert refused.code == 2 and "use one of plain" in refused.err
