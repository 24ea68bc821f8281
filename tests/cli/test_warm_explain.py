"""`semkv warm` and `semkv explain` check what they are given before vLLM is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv_rag.engine import offline
from tests.cli.conftest import Semkv


@pytest.fixture(autouse=True)
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fails when anybody wants it."""
    monkeypatch.delattr(offline, "OfflineModel")


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ('{"prompt": "a"}\n{"promt": "b"}\n', (), "prompts.jsonl:2: unknown ['promt']"),
        ("", ("--prompt-cache", '{"capture_byte": 1}'), "unknown ['capture_byte']"),
        ("", ("--prompt-cache", "threshold=1"), "write a JSON object"),
        ("", ("--prompt-cache", "[1]"), "write a JSON object"),
        ("", ("--tier-encoder", "minilm"), "write LAYER=NAME"),
        ("", ("--tier-encoder", "a=minilm", "--tier-encoder", "a=phash"), "once for each layer"),
        ("", ("--tier-encoder", "semantic=phash"), "reads text"),
        ("", ("--prompt-cache", '{"thresholds": {"vision": 1}}'), "the layers are ['semantic']"),
        ("", ("--namespace", ""), "namespace is ''"),
        ("", ("--engine-arg", "dtype"), "write NAME=VALUE"),
    ],
)
def test_warm(
    semkv: Semkv, tmp_path: Path, content: str, options: tuple[str, ...], words: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    outcome = semkv("warm", file, "--model", "m", "--store", tmp_path / "store", *options)
    assert outcome.code == 2
    assert outcome.err.startswith("semkv: ")
    assert words in outcome.err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--threshold", "2"), 2, "threshold is 2.0: use a number from -1 to 1"),
        (("--threshold", "0", "--reuse", "answers"), 2, "use one of aligned, substitute"),
        (("--prompt-cache", '{"reuse": "answers"}'), 2, "use one of aligned, substitute"),
        ((), 1, "there is no store at"),
    ],
)
def test_explain(
    semkv: Semkv, tmp_path: Path, options: tuple[str, ...], code: int, words: str
) -> None:
    outcome = semkv("explain", "Hi", "--model", "m", "--store", tmp_path / "none", *options)
    assert (outcome.code, outcome.out) == (code, "")
    assert words in outcome.err


def test_explain_wants_a_prompt(semkv: Semkv, tmp_path: Path) -> None:
    outcome = semkv("explain", "-", "--model", "m", "--store", tmp_path, answer="")
    assert outcome.code == 2
    assert "the prompt is empty" in outcome.err
