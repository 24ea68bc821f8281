"""The model that an engine serves is collected, and captures find no room, while it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.engine import Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from semkv_rag.store import Limit, Pin
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.tiered import tiered

QUESTION = random_tokens(301, 10)
COMMAND = [sys.executable, "-m", "semkv_rag.cli"]


@pytest.fixture
def own_engine(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with engines.own(tiny_model("qwen3")) as engine:
        yield engine


def gc(engine: Engine, *arguments: str) -> subprocess.Popen[str]:
    assert engine.store is not None
    command = [*COMMAND, "gc", "--store", str(engine.store.root), "--json", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(running: subprocess.Popen[str]) -> Any:
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0
    return json.loads(out)


def test_collecting_the_model_in_use(own_engine: Engine) -> None:
    engine = own_engine
    assert engine.store is not None
    chunks = store_chunks(
        engine, [random_tokens(seed, 40) for seed in range(200)], namespace="default"
    )
    engine.store.put_source(
        engine.fingerprint, "default", "doc", "1", [chunk.id for chunk in chunks]
    )
    engine.store.lifecycle.pin(Pin(namespace="default", source="doc"))
    prompts = [
        random_tokens(400 + turn, 9)
        + [token for chunk in chunks[turn::40] for token in chunk.tokens]
        + QUESTION
        for turn in range(40)
    ]
    references = [plain(engine, prompt) for prompt in prompts[:4]]
    assert blended(engine, prompts[0], ratio=1.0).report.kv_cache == "hit"
    assert result(gc(engine))["models"]["chunks"] == 0
    assert blended(engine, prompts[1], ratio=1.0).report.kv_cache == "hit", "nothing was named"

    collecting = gc(engine, "--model", engine.fingerprint[:16])
    asked = 0
    while collecting.poll() is None:  # it runs for seconds: requests meet every moment of it
        engine.reset_prefix_cache()
        turn = asked % len(references)
        assert_same(blended(engine, prompts[turn], ratio=1.0), references[turn])
        asked += 1
    taken = result(collecting)["models"]
    assert (taken["sources"], taken["chunks"], taken["pinned"]) == (1, 200, 200)
    assert asked
    assert list(engine.store.root.rglob("*.safetensors")) == []
    assert engine.store.models() == []

    engine.reset_prefix_cache()
    missed = blended(engine, prompts[0])
    assert missed.report.kv_cache == "miss"
    assert missed.report.reason == "no stored chunk was found in the prompt"
    assert_same(missed, references[0])

    store_chunks(engine, [chunk.tokens for chunk in chunks[::40]], namespace="default")
    engine.reset_prefix_cache()
    again = blended(engine, prompts[0], ratio=1.0)
    assert again.report.kv_cache == "hit", "what is stored anew is found, without a restart"
    assert_same(again, references[0])
    assert engine.store.verify().ok


def test_a_capture_without_room_fails_no_request(
    own_engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = own_engine
    assert engine.store is not None
    chunk = store_chunks(engine, [random_tokens(1, 60)], namespace="default")[0]
    there = engine.store.get(engine.fingerprint, "default", [chunk.id])[chunk.id].bytes
    engine.store.lifecycle.pin(Pin(model=engine.fingerprint))
    engine.store.lifecycle.set_limit(Limit(None, max_bytes=there + 1))
    prompt = random_tokens(9001, 150)
    with caplog.at_level("INFO"), tiered(engine, PromptCacheOptions(threshold=0.5)) as tiering:
        answered = blended(engine, prompt)
        tiering.settle()
    assert_same(answered, plain(engine, prompt))
    assert "a prompt was not stored" in caplog.text
    assert "semkv unpin" in caplog.text
    assert [record.id for record in engine.store.chunks()] == [chunk.id]
    assert len(list(engine.store.root.rglob("*.safetensors"))) == 1
