"""`semkv serve` keeps its own options, checks them, and passes the rest on to vLLM untouched."""

from pathlib import Path
from typing import Any

import pytest

from semkv_rag.config import PRESETS, ReuseOptions
from semkv_rag.prompt_cache import PromptCacheOptions
from semkv_rag.store import ObjectPlace, StorePlace
from tests.cli.conftest import Semkv
from workbench.settings import READER

MODEL = str(READER)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server was started with, instead of a server. tests/engine has the real one."""
    seen: dict[str, Any] = {}

    def serve(model: str, **options: Any) -> int:
        seen.update(options, model=model)
        return 0

    monkeypatch.setattr("semkv_rag.server.serve.serve", serve)
    return seen


def test_vllm_gets_what_is_not_ours_in_its_order(
    semkv: Semkv, served: dict[str, Any], tmp_path: Path
) -> None:
    vllm_args = ["--port=8001", "-tp", "2", "--override", '{"a": 1}', "--no-enable-log-requests"]
    outcome = semkv(
        "serve", MODEL, *vllm_args, "--store", tmp_path, "--ratio", "0.3", "--last", "x"
    )
    assert outcome.code == 0, outcome.err
    assert served["vllm_args"] == [*vllm_args, "--last", "x"]
    assert (served["model"], served["store"]) == (MODEL, StorePlace(tmp_path))
    assert served["reuse"] == ReuseOptions(ratio=0.3)
    assert served["trust_request_namespace"] is False
    assert served["api_key_namespaces"] is None


@pytest.mark.parametrize(
    ("given", "size"),
    [((), 0), (("--ram-bytes", "1.5GB"), 1_500_000_000), (("--ram-bytes=64",), 64)],
)
def test_memory_is_given_as_people_write_it(
    semkv: Semkv, served: dict[str, Any], tmp_path: Path, given: tuple[str, ...], size: int
) -> None:
    assert semkv("serve", MODEL, "--store", tmp_path, *given).code == 0
    assert served["ram_bytes"] == size


def test_a_store_in_an_object_store_has_a_folder_in_front(
    semkv: Semkv, served: dict[str, Any], tmp_path: Path
) -> None:
    given = ("--cache-dir", tmp_path, "--cache-bytes", "200GB", "--fetch-timeout-ms", "50")
    assert semkv("serve", MODEL, "--store", "s3://bucket/kv", *given).code == 0
    objects = ObjectPlace("s3://bucket/kv", cache_bytes=200_000_000_000, fetch_timeout_ms=50)
    assert served["store"] == StorePlace(tmp_path, objects)
    outcome = semkv("serve", MODEL, "--store", tmp_path, *given)
    assert outcome.code == 2 and "is a folder" in outcome.err


def test_a_size_that_is_none_is_told(semkv: Semkv, served: dict[str, Any], tmp_path: Path) -> None:
    outcome = semkv("serve", MODEL, "--store", tmp_path, "--ram-bytes", "much")
    assert outcome.code == 2 and "20GB" in outcome.err


def test_api_keys_come_from_a_file(semkv: Semkv, served: dict[str, Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text('{"secret": "tenant"}')
    options = ("--api-key-namespaces", keys, "--namespace", "other")
    assert semkv("serve", MODEL, "--store", tmp_path, *options).code == 0
    assert served["api_key_namespaces"] == {"secret": "tenant"}
    assert served["namespace"] == served["reuse"].namespace == "other"


@pytest.mark.parametrize("content", ["nonsense", "[1]", '{"secret": ""}', '{"secret": 3}'])
def test_keys_that_make_no_sense_are_refused(
    semkv: Semkv, served: dict[str, Any], tmp_path: Path, content: str
) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(content)
    outcome = semkv("serve", MODEL, "--store", tmp_path, "--api-key-namespaces", keys)
    assert outcome.code == 2
    assert outcome.err.startswith("semkv: ")
    assert not served


def test_reuse_options_are_checked(semkv: Semkv, served: dict[str, Any], tmp_path: Path) -> None:
    outcome = semkv("serve", MODEL, "--store", tmp_path, "--ratio", "2")
    assert outcome.code == 2
    assert "ratio is 2.0: use a number from 0 to 1" in outcome.err
    assert not served


def test_a_preset_under_what_is_given_beside_it(
    semkv: Semkv, served: dict[str, Any], tmp_path: Path
) -> None:
    serve = ("serve", MODEL, "--store", tmp_path)
    assert semkv(*serve, "--preset", "exact", "--selector", "chunk_head").code == 0
    assert served["reuse"] == ReuseOptions(ratio=1.0, selector="chunk_head", promise=0.0)
    assert semkv(*serve, "--preset", "fast", "--ratio", "auto").code == 0
    assert served["reuse"] == ReuseOptions(ratio="auto", promise=PRESETS["fast"].promise)
    assert semkv(*serve, "--question-tokens", "12").code == 0
    assert served["reuse"] == ReuseOptions(question_tokens=12)
    served.clear()
    outcome = semkv(*serve, "--preset", "best")
    assert outcome.code == 2
    assert "preset is 'best': use one of fast, balanced, exact" in outcome.err
    assert not served


def test_tiers(semkv: Semkv, served: dict[str, Any], tmp_path: Path) -> None:
    assert semkv("serve", MODEL, "--store", tmp_path).code == 0
    assert (served["prompt_cache"], served["encoders"]) == (None, None)
    assert semkv("serve", MODEL, "--store", tmp_path, "--prompt-cache", "{}").code == 0
    assert (served["prompt_cache"], served["encoders"]) == (PromptCacheOptions(), None)
    given = ("--prompt-cache", '{"threshold": 0.9, "thresholds": {"vision": 0.95}}')
    layers = ("--tier-encoder", "semantic=minilm", "--tier-encoder=vision=phash")
    assert semkv("serve", MODEL, "--store", tmp_path, *given, *layers, "--port", 80).code == 0
    assert served["prompt_cache"] == PromptCacheOptions(threshold=0.9, thresholds={"vision": 0.95})
    names = {layer: encoder.name for layer, encoder in served["encoders"].items()}
    assert names == {"semantic": "all-MiniLM-L6-v2", "vision": "phash-8"}
    assert served["vllm_args"] == ["--port", "80"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prompt-cache", '{"treshold": 0.9}'), "unknown ['treshold']"),
        (("--tier-encoder", "vision=phash"), "give prompt_cache too"),
    ],
)
def test_tiers_are_checked(
    semkv: Semkv, served: dict[str, Any], tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    outcome = semkv("serve", MODEL, "--store", tmp_path, *options)
    assert outcome.code == 2
    assert words in outcome.err
    assert not served
