"""LoRA adapters from the command line to an answer over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from semkv_rag.llm import RemoteBackend
from semkv_rag.report import ReuseReport
from tests.cli.conftest import Semkv
from workbench.adapters import build_adapter
from workbench.server import Server
from workbench.settings import ENGINE_ARGS

OTHER = "what a client of the server brings is stored by the server for the model it names. " * 6
WHOLE = "a prompt that is asked again and again is stored ahead, and found by its tokens. " * 6
TEXT = "the store keeps the keys and values of each chunk layer by layer in one file. " * 6


def report_of(server: Server, model: str, text: str = TEXT) -> ReuseReport:
    client = openai.OpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 2}
    answer: Any = client.completions.create(model=model, prompt=f"{text}\nwho?", **fields)
    return ReuseReport.from_mapping(answer.kv_transfer_params["semkv"])


def check_storing_over_http(server: Server) -> None:
    """What a client of an adapter stores is the adapter's; `forget` removes nothing else."""
    of_model, of_adapter = (
        RemoteBackend(server.base_url, model=name, api_key=server.api_key)
        for name in (server.model, "b")
    )
    assert of_adapter.context_window == of_model.context_window
    assert of_adapter.fingerprint() != of_model.fingerprint()
    documents = [("two", [OTHER])]
    for backend in (of_adapter, of_model):
        assert report_of(server, backend.model_name, OTHER).kv_cache == "miss"
        assert backend.store_texts(documents).failures == []
        assert report_of(server, backend.model_name, OTHER).kv_cache == "hit"
    assert of_adapter.forget(["two"]) == 1
    assert report_of(server, "a", OTHER).kv_cache == "miss"
    assert report_of(server, server.model, OTHER).kv_cache == "hit"
    answer = httpx.post(
        server.base_url.removesuffix("/v1") + "/semkv/v1/forget",
        json={"model": "c", "sources": ["two"]},
        headers={"Authorization": f"Bearer {server.api_key}"},
        timeout=60,
    )
    assert answer.status_code == 400
    assert f"it has {server.model}, a, b" in answer.text


def check_whole_prompts(semkv: Semkv, where: list[Any], lora: str, folder: Path) -> None:
    """A prompt that was warmed for an adapter is explained by it, and not for the model alone."""
    prompt = f"{WHOLE}\nwhat?"
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": prompt}))
    warmed = semkv("warm", folder / "prompts.jsonl", *where, "--lora", lora, "--json")
    assert (warmed.code, warmed.data["computed"]) == (0, 1), warmed.err
    for options, served in ((("--lora", lora), "exact_text"), ((), None)):
        told = semkv("explain", prompt, *where, *options, "--json")
        assert told.code == 0, told.err
        assert (told.data["served"] or {}).get("tier") == served
    (folder / "questions.json").write_text(
        json.dumps([{"ctxs": [{"text": text} for text in (TEXT, WHOLE)], "question": "who?"}])
    )
    asked = ("quality", *where, "--questions", folder / "questions.json", "--precompute")
    asked += ("--namespace", "asked", "--selector", "none", "--ratio", "0", "--max-tokens", "2")
    compared = semkv(*asked, "--lora", lora, "--json")
    assert compared.code == 0, compared.err
    assert (compared.data["lora"], compared.data["full"]["questions"]) == ("a", 1)


@pytest.mark.soak
@pytest.mark.engine
def test_what_was_stored_for_an_adapter_is_served_to_its_requests(
    semkv: Semkv, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tiny_model("qwen3")
    adapter = build_adapter(model, tmp_path / "a", seed=1)
    (tmp_path / "one.txt").write_text(TEXT)
    extra = ["--enable-lora", "--max-lora-rank", "8"]
    extra += ["--lora-modules", f"a={adapter}", f"b={adapter}"]
    server = Server(model, tmp_path, extra)

    store = [tmp_path / "one.txt", "--model", model, "--store", server.store]
    for name, value in ENGINE_ARGS.items():
        store += ["--engine-arg", f"{name}={value}"]
    stored = semkv("precompute", *store, "--lora", f"a={adapter}", "--json")
    assert (stored.code, stored.data["changed"]) == (0, 1), stored.err
    (description,) = semkv("info", "--store", server.store, "--json").data["models"].values()
    assert (description["model"], description["lora"]) == (str(model), "a")
    again = semkv("precompute", *store, "--lora", f"a={adapter}", "--dry-run", "--json")
    assert again.data["to_compute"]["chunks"] == 0
    base = semkv("precompute", *store, "--dry-run", "--json")
    assert base.data["to_compute"]["chunks"] > 0, "the model alone has none"

    ask = ["ask", "who?", "--context", *store, "--max-tokens", 2, "--json"]
    answers = [semkv(*ask, *options) for options in ((), ("--lora", f"b={adapter}"))]
    assert [answer.code for answer in answers] == [0, 0], answers
    assert [answer.data["report"]["kv_cache"] for answer in answers] == ["miss", "hit"]

    check_whole_prompts(semkv, [*store[1:]], f"a={adapter}", tmp_path)
    with server:
        # `b` is the same adapter under another name.
        for name in ("a", "b", "a"):
            assert report_of(server, name).kv_cache == "hit"
        assert report_of(server, server.model).kv_cache == "miss"
        check_storing_over_http(server)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("a", "write NAME=PATH"),
        ("a=MISSING", "there is no such folder on this machine"),
        ("a=FOLDER", "it has no adapter_config.json"),
    ],
)
def test_a_path_that_is_no_adapter_is_refused_first(
    semkv: Semkv, tiny_model: Callable[[str], Path], tmp_path: Path, given: str, words: str
) -> None:
    given = given.replace("MISSING", str(tmp_path / "nowhere")).replace("FOLDER", str(tmp_path))
    (tmp_path / "one.txt").write_text(TEXT)
    common = ["--model", tiny_model("qwen3"), "--store", tmp_path / "store"]
    outcome = semkv("precompute", tmp_path / "one.txt", *common, "--lora", given)
    assert outcome.code != 0
    assert words in outcome.err
    assert not (tmp_path / "store").exists()
