"""The verbs that start vLLM, on a tiny model: precompute, ask, warm, explain and doctor, end to end.

One story told in one test, because each step starts an engine; in this process, where that is quick.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.cli.conftest import Semkv
from workbench.tiny_models import build_tiny_model

SENTENCE = "the store keeps the keys and values of each chunk layer by layer in one file"
WORDS = SENTENCE.split()
PREFIX = "every answer is short and stands somewhere in its context"
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


@pytest.mark.engine
def test_from_documents_to_an_answer(semkv: Semkv, folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    model = build_tiny_model("qwen3", tmp_path / "model")
    common = ["--model", model, "--store", store]
    for name, value in ENGINE_ARGS.items():
        common += ["--engine-arg", f"{name}={value}"]
    chunking = ["--chunk-tokens", 64, "--prefix", PREFIX, "--chat"]

    told = semkv("precompute", folder, *common, *chunking, "--dry-run", "--json")
    assert told.code == 1, "a document cannot be read"
    assert not store.exists()
    first = semkv("precompute", folder, *common, *chunking, "--json")
    assert first.code == 1, "a document could not be read"
    assert "docs/broken.pdf: broken or locked PDF" in first.err
    assert first.data["changed"] == 2
    assert first.data["chunks_captured"] > 4
    work = told.data["to_compute"]
    assert (work["documents"], work["chunks"]) == (2, first.data["chunks_captured"])
    assert work["tokens"] == first.data["tokens"]
    assert 0.5 < work["bytes"] / first.data["bytes"] <= 1, "the files' headers are small"
    assert semkv("verify", "--store", store).code == 0
    (description,) = semkv("info", "--store", store, "--json").data["models"].values()
    assert description["model"] == str(model)
    assert description["dtype"] == "float32"

    (folder / "broken.pdf").unlink()
    again = semkv("precompute", folder, *common, *chunking, "--sync")
    assert again.code == 0
    assert "2 documents: 0 new or changed, 2 unchanged" in again.out
    program = "import sys; sys.modules['vllm'] = None\nfrom semkv_rag.cli import main; main()"
    arguments = [str(one) for one in ("precompute", folder, *common, *chunking)]
    without_vllm = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )
    assert without_vllm.returncode == 0, without_vllm.stderr
    assert "0 new or changed, 2 unchanged" in without_vllm.stdout

    ask = ["ask", "who keeps the keys", *common, "--max-tokens", 4, "--prefix", PREFIX, "--json"]
    context = ["--context", folder / "one.txt", "--context", folder / "two.md"]
    plain = semkv(*ask, *context, "--off")
    assert plain.code == 0
    assert plain.data["report"]["kv_cache"] == "skip"

    whole = semkv(*ask, *context, "--ratio", 1, "--html", tmp_path / "asked.html")
    report = whole.data["report"]
    assert whole.data["answer"] == plain.data["answer"]
    assert report["kv_cache"] == "hit"
    assert report["exact_tokens"] >= len(PREFIX.split())
    assert report["reused_tokens"] > 100
    assert report["token_map"]["spans"]
    assert "one.txt" in (tmp_path / "asked.html").read_text()

    prompts = tmp_path / "prompts.jsonl"
    asked = " ".join(WORDS * 3)
    too_long = " ".join(WORDS * 200)
    lines = [{"prompt": asked}, {"prompt": too_long}, {"prompt": f"{asked} and why"}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    warmed = semkv("warm", prompts, *common, "--json")
    assert warmed.code == 1, "a prompt is too long"
    assert f"{prompts}:2: " in warmed.err
    assert "tokens, and the model takes 1,024" in warmed.err
    assert (warmed.data["stored"], warmed.data["computed"]) == (2, 2)
    explained = semkv("explain", asked.upper(), *common, "--json")
    assert explained.code == 0
    assert explained.data["served"]["tier"] == "exact_text"
    assert explained.data["served"]["text"] == asked
    assert {one["text"] for one in explained.data["candidates"]} == {asked, f"{asked} and why"}

    looked = ["--html", tmp_path / "prompt.html"]
    shown = semkv("explain", f"{PREFIX} {asked}", *common, *looked, "--map", "--chat")
    assert shown.code == 0
    assert "tokens; of them stored" in shown.out
    assert "loaded, exact" in shown.out
    page = (tmp_path / "prompt.html").read_text()
    assert 'class="exact"' in page
    nowhere = semkv("explain", asked, *common, "--html", tmp_path / "none" / "prompt.html")
    assert nowhere.code == 2
    assert "there is no folder" in nowhere.err

    healthy = semkv("doctor", *common)
    assert healthy.code == 0, healthy.out
    assert "model: " in healthy.out


@pytest.mark.engine
def test_a_question_goes_through_the_chat_template(semkv: Semkv, tmp_path: Path) -> None:
    model = build_tiny_model("qwen3", tmp_path / "model")
    common = ["--model", model, "--store", tmp_path / "store"]
    for name, value in ENGINE_ARGS.items():
        common += ["--engine-arg", f"{name}={value}"]
    ask: list[object] = ["ask", "who keeps the keys", *common, "--off", "--max-tokens", 1, "--json"]
    told, raw = semkv(*ask).data, semkv(*ask, "--no-chat").data
    tokenizer = AutoTokenizer.from_pretrained(model)
    message = tokenizer("user: who keeps the keys\nassistant:").input_ids
    assert told["prompt_tokens"] == len(message)
    assert raw["prompt_tokens"] == len(tokenizer("who keeps the keys").input_ids)
    without = build_tiny_model("qwen3", tmp_path / "without")
    (without / "chat_template.jinja").unlink()
    ask[ask.index(model)] = without
    refused = semkv(*ask, "--chat")
    assert refused.code == 2
    assert "chat template" in refused.err


@pytest.mark.engine
def test_a_model_that_cannot_reuse_is_refused_with_the_reason(
    semkv: Semkv, folder: Path, tmp_path: Path
) -> None:
    model = build_tiny_model("gpt2", tmp_path / "model")
    arguments = ("--engine-arg", f"kv_cache_memory_bytes={64 << 20}")
    outcome = semkv(
        "precompute", folder, "--model", model, "--store", tmp_path / "store", *arguments
    )
    assert outcome.code == 1
    assert "semkv: this model cannot be served with reuse: " in outcome.err
    assert "positions are not relative" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.engine
def test_a_model_that_vllm_cannot_load_is_one_clear_message(
    semkv_process: Semkv, tmp_path: Path
) -> None:
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "config.json").write_text("{}")
    outcome = semkv_process(
        "ask", "hello", "--model", tmp_path / "none", "--store", tmp_path / "store"
    )
    assert outcome.code == 1
    assert "semkv: vLLM cannot load" in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
