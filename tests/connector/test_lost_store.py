"""The store goes away, or cannot be written, while an engine runs on it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import Engine
from semkv_rag.engine import engine as engine_module
from semkv_rag.engine.startup import Started, start
from semkv_rag.reuse import token_array
from semkv_rag.store import KVStore, chunk_id
from workbench.answers import assert_same, blended, counted, plain
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import limit_file_size

QUESTION = random_tokens(301, 10)


@pytest.fixture
def own_engine(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with engines.own(tiny_model("qwen3")) as engine:
        yield engine


@contextmanager
def unwritable(engine: Engine) -> Iterator[str]:
    """The store's folder read-only: by a mount where that can be had, else by a limit of 4 KiB."""
    assert engine.store is not None
    folder, mount, unmount = str(engine.store.root), shutil.which("mount"), shutil.which("umount")
    bind = [str(mount), "--bind", folder, folder]
    if mount and unmount and subprocess.run(bind, capture_output=True).returncode == 0:
        try:
            subprocess.run([mount, "-o", "remount,ro,bind", folder], check=True)
            yield "a read-only mount"
        finally:
            subprocess.run([unmount, "--lazy", folder], check=True)
        return
    limit_file_size(engine, 4096)
    try:
        yield "a limit of 4 KiB"
    finally:
        limit_file_size(engine, -1)


def test_unwritable_then_without_an_index(own_engine: Engine) -> None:
    engine = own_engine
    assert engine.store is not None
    chunk = store_chunks(engine, [random_tokens(1, 120)], namespace="default")[0]
    prompt = random_tokens(302, 9) + chunk.tokens + QUESTION

    # Nothing can be written: reading goes on, a capture fails in words.
    tokens = token_array(random_tokens(2, 50))
    identity = chunk_id(engine.fingerprint, "default", token_array([]), tokens)
    item = CaptureItem(identity, "default", "document", tokens, token_array([]))
    with unwritable(engine) as how:
        hit = blended(engine, prompt)
        assert hit.report.kv_cache == "hit", how
        (result,) = engine.capture([item])
        assert result.error is not None
        assert "could not be written" in result.error
    (result,) = engine.capture([item])
    assert result.error is None

    # The index is deleted: answered as by plain vLLM, with a reason.
    for file in engine.store.root.glob("index.sqlite*"):
        file.unlink()
    engine.reset_prefix_cache()
    lost = blended(engine, prompt)
    assert lost.report.kv_cache == "miss"
    assert lost.report.reason is not None
    assert lost.report.reused_tokens == 0
    assert_same(lost, plain(engine, prompt))

    # It is made again out of the files: reuse goes on, without a restart.
    assert engine.store.rebuild_index().ok
    engine.reset_prefix_cache()
    found = blended(engine, prompt)
    assert found.report.chunk_ids == (chunk.id,)
    assert_same(found, hit)
    assert counted(engine, "semkv_faults_total", "index") == 1
    assert counted(engine, "semkv_plain_requests_total", "fault") == 1


def test_a_store_that_cannot_be_opened(
    engines: Engines, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index goes away while the engine starts: everybody is answered as by plain vLLM."""

    async def start_without(*args: Any, store: KVStore, **options: Any) -> Started:
        index = store.root / "index.sqlite"
        aside = index.rename(index.with_suffix(".aside"))
        index.mkdir()
        try:
            return await start(*args, store=store, **options)
        finally:
            index.rmdir()
            aside.rename(index)

    monkeypatch.setattr(engine_module, "start", start_without)
    with engines.own(tiny_model("qwen3")) as engine:
        answer = blended(engine, random_tokens(303, 40))
        assert answer.report.kv_cache == "skip"
        assert answer.report.reason is not None
        assert answer.report.reason.startswith("the store cannot be used: ")
        assert counted(engine, "semkv_plain_requests_total", "store") == 1
