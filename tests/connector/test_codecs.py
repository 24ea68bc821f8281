"""Chunks under lossy codecs are reused, never taken for exact, and harm no request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.errors import OptionError
from semkv_rag.store import ChunkFile, write_chunk
from semkv_rag.store.codecs import codec_names
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines

PREFIX = random_tokens(900, 45)
QUESTION = random_tokens(901, 12)
LOSSY = [name for name in codec_names() if name != "plain"]


def prompt_of(chunks: list[Stored]) -> Tokens:
    return PREFIX + [token for chunk in chunks for token in chunk.tokens] + QUESTION


def three(engine: Engine, namespace: str) -> list[Stored]:
    return store_chunks(engine, [random_tokens(s, 90) for s in (1, 2, 3)], namespace=namespace)


def recode(engine: Engine, namespace: str, codec: str) -> None:
    assert engine.store is not None
    assert engine.store.recode(codec, namespace=namespace).failures == ()


def afresh(engine: Engine, prompt: Tokens, namespace: str, **options: Any) -> Completion:
    engine.reset_prefix_cache()
    return blended(engine, prompt, namespace=namespace, **options)


@pytest.mark.parametrize("codec", LOSSY)
def test_recoded_chunks_are_blended(engine: Engine, namespace: str, codec: str) -> None:
    prompt = prompt_of(three(engine, namespace))
    before = afresh(engine, prompt, namespace, ratio=0.3)
    recode(engine, namespace, codec)
    after = afresh(engine, prompt, namespace, ratio=0.3)
    assert before.report.codecs == ("plain",)
    assert after.report.codecs == (codec,)
    assert after.report.kv_cache == "hit"
    assert after.report.reused_tokens == before.report.reused_tokens == 270
    assert 0 < after.report.file_bytes < before.report.file_bytes / 2
    assert after.logprobs != before.logprobs
    assert_same(afresh(engine, prompt, namespace, ratio=1.0), plain(engine, prompt))


def test_a_lossy_chunk_behind_its_own_context_is_not_exact(engine: Engine, namespace: str) -> None:
    chunk = store_chunks(engine, [random_tokens(1, 150)], namespace=namespace, context=PREFIX)[0]
    prompt = PREFIX + chunk.tokens + QUESTION
    assert afresh(engine, prompt, namespace).report.exact_tokens == 150
    recode(engine, namespace, "int8")
    report = afresh(engine, prompt, namespace, selector="none").report
    assert (report.exact_tokens, report.reused_tokens) == (0, 150)
    exact = engine.generate(
        prompt, sampling=SAMPLING, reuse=ReuseOptions.preset("exact", namespace=namespace)
    )
    assert exact.report.recomputed_tokens == 150
    assert_same(exact, plain(engine, prompt))


def test_the_prefix_cache_stays_exact_behind_lossy_blends(engine: Engine) -> None:
    # The default namespace: only there could blends and ordinary requests share blocks at all.
    chunks = store_chunks(engine, [random_tokens(77, 150)], namespace="default", context=PREFIX)
    recode(engine, "default", "int8")
    prompt = prompt_of(chunks)
    right = plain(engine, prompt)
    engine.reset_prefix_cache()
    assert blended(engine, prompt, selector="none").report.codecs == ("int8",)
    again = blended(engine, prompt, selector="none")
    assert again.report.cached_tokens > len(PREFIX) + 100
    ordinary = engine.generate(prompt, sampling=SAMPLING, reuse=ReuseOptions(enabled=False))
    assert ordinary.report.cached_tokens <= len(PREFIX)
    assert_same(ordinary, right)


def test_a_file_with_another_codec_than_the_index_says_is_not_taken_for_exact(
    engine: Engine, namespace: str
) -> None:
    """As between a recoded file and its row; the request is computed."""
    chunk = store_chunks(engine, [random_tokens(1, 150)], namespace=namespace, context=PREFIX)[0]
    prompt = PREFIX + chunk.tokens + QUESTION
    assert engine.store is not None
    path = engine.store.path(engine.fingerprint, namespace, chunk.id)
    with ChunkFile(path, model=None) as file:
        layers = [file.layer(index) for index in range(file.header.layers)]
        header = file.header
    write_chunk(path, replace(header, codec="int8"), layers)
    answer = afresh(engine, prompt, namespace)
    assert answer.report.kv_cache == "miss"
    assert "recoded from plain to int8" in (answer.report.reason or "")
    assert answer.report.codecs == ()
    assert_same(answer, plain(engine, prompt))
    recode(engine, namespace, "int8")
    assert afresh(engine, prompt, namespace).report.codecs == ("int8",)


@pytest.fixture(scope="module")
def small(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with engines.own(tiny_model("qwen3"), codec="int8", ram_bytes=8 << 20, dtype="bfloat16") as one:
        yield one


def test_captures_are_stored_by_the_engines_codec(small: Engine, namespace: str) -> None:
    chunks = three(small, namespace)
    assert small.store is not None
    records = small.store.get(small.fingerprint, namespace, [chunk.id for chunk in chunks])
    assert {record.codec for record in records.values()} == {"int8"}
    assert small.store.verify().ok


def test_the_ram_tier_keeps_what_is_stored(small: Engine, namespace: str) -> None:
    prompt = prompt_of(three(small, namespace))
    first = afresh(small, prompt, namespace, ratio=0.3)
    again = afresh(small, prompt, namespace, ratio=0.3)
    assert again.report.file_bytes == 0
    assert again.report.memory_bytes == first.report.file_bytes + first.report.memory_bytes > 0
    assert_same(again, first)


def test_memory_that_has_a_chunk_as_it_was_before_is_not_asked(
    engines: Engines, tiny_model: Callable[[str], Path], namespace: str
) -> None:
    with engines.own(tiny_model("qwen3"), ram_bytes=8 << 20) as one:
        prompt = prompt_of(three(one, namespace))
        plain = afresh(one, prompt, namespace).report
        recode(one, namespace, "int4")
        report = afresh(one, prompt, namespace).report
        assert report.codecs == ("int4",)
        # Read by the blend, or ahead of it on a busy machine: in either case as it is now.
        before, now = (told.memory_bytes + told.file_bytes for told in (plain, report))
        assert 0 < now < before / 2
        again = afresh(one, prompt, namespace).report
        assert (again.memory_bytes, again.file_bytes) == (now, 0)


def test_an_unknown_codec_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="use one of plain, fp8, int8, k8v4, int4"):
        Engine("no/such-model", store=tmp_path, codec="int3")
    with pytest.raises(OptionError, match="codec needs a store"):
        Engine("no/such-model", codec="int8")
