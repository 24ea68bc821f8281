"""The verbs that start vLLM, on a tiny model: precompute, ask and doctor, end to end.

One story told in one test, because each step starts an engine.
"""

from pathlib import Path

import pytest

from tests.cli.conftest import Semkv
from tests.tiny_models import build_tiny_model

SENTENCE = "the store keeps the keys and values of each chunk layer by layer in one file"
WORDS = SENTENCE.split()
HEAD = "every answer is short and stands somewhere in its context"
ENGINE_ARGS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 64 << 20,
    "seed": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two documents of about 100 words, and one that cannot be read."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "one.txt").write_text(". ".join(" ".join(WORDS[n:] + WORDS[:n]) for n in range(7)))
    (folder / "two.md").write_text(f"# Two\n\n{' '.join(reversed(WORDS * 6))}\n")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.7")
    return folder


def test_from_documents_to_an_answer(semkv: Semkv, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    model = build_tiny_model("qwen3", tmp_path / "model")
    common = ["--model", model, "--store", store]
    for name, value in ENGINE_ARGS.items():
        common += ["--engine-arg", f"{name}={value}"]
    chunking = ["--chunk-tokens", 64, "--head", HEAD]

    first = semkv("precompute", folder, *common, *chunking, "--json")
    assert first.code == 1, "a document could not be read"
    assert "docs/broken.pdf: broken or locked PDF" in first.err
    assert first.data["changed"] == 2
    assert first.data["chunks_captured"] > 4
    assert semkv("verify", "--store", store).code == 0

    (folder / "broken.pdf").unlink()
    again = semkv("precompute", folder, *common, *chunking, "--sync")
    assert again.code == 0
    assert "2 documents: 0 new or changed, 2 unchanged" in again.out

    ask = ["ask", "who keeps the keys", *common, "--max-tokens", 4, "--head", HEAD, "--json"]
    context = ["--context", folder / "one.txt", "--context", folder / "two.md"]
    plain = semkv(*ask, *context, "--off")
    assert plain.code == 0
    assert plain.data["report"]["kv_cache"] == "skip"

    whole = semkv(*ask, *context, "--ratio", 1)
    report = whole.data["report"]
    assert whole.data["answer"] == plain.data["answer"]
    assert report["kv_cache"] == "hit"
    assert report["exact_tokens"] >= len(HEAD.split())
    assert report["reused_tokens"] > 100

    other = semkv(*ask, *context, "--namespace", "other")
    assert other.data["report"]["kv_cache"] == "miss"

    healthy = semkv("doctor", *common)
    assert healthy.code == 0, healthy.out
    assert "model: " in healthy.out


def test_a_model_that_cannot_reuse_is_told_by_doctor_and_precompute(
    semkv: Semkv, folder: Path, tmp_path: Path
) -> None:
    model = build_tiny_model("mistral_sliding", tmp_path / "model")
    common = ["--model", model, "--engine-arg", "max_model_len=512", "--engine-arg"]
    common += [f"kv_cache_memory_bytes={64 << 20}"]
    doctor = semkv("doctor", *common)
    assert doctor.code == 1
    assert "runs, but without reuse" in doctor.out

    precompute = semkv("precompute", folder, *common, "--store", tmp_path / "store")
    assert precompute.code == 1
    assert precompute.err.splitlines()[-1].startswith("semkv: ")
    assert "Traceback" not in precompute.err


def test_a_model_that_is_not_there_is_one_clear_message(semkv: Semkv, tmp_path: Path) -> None:
    outcome = semkv("ask", "hello", "--model", tmp_path / "none", "--store", tmp_path / "store")
    assert outcome.code == 1
    assert "semkv: vLLM cannot load" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
