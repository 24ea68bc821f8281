"""A fault of the store never fails a request: it is answered as by plain vLLM, and told why."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from torch import Tensor

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import Completion, Engine
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkFile, ChunkHeader, chunk_id, write_chunk
from workbench.answers import SAMPLING, assert_same, blended, counted, plain
from workbench.chunks import Stored, random_tokens, store_chunks
from workbench.inside import inside, limit_file_size, open_chunk_files

QUESTION = random_tokens(601, 10)

KV: TypeAlias = tuple[Tensor, Tensor]
"""A layer's K and V, each [tokens, kv_heads, head_dim]."""


def delete(path: Path, model: str) -> None:
    path.unlink()


def truncate(path: Path, model: str) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path, model: str) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


def another_model(path: Path, model: str) -> None:
    with ChunkFile(path, model=model) as file:
        own = file.header
        layers = [file.layer(index) for index in range(own.layers)]
    fields = {name: getattr(own, name) for name in ("namespace", "kind", "tokens", "context")}
    foreign = "0" * 64
    header = ChunkHeader(
        id=chunk_id(foreign, own.namespace, own.context, own.tokens),
        model=foreign,
        dtype=own.dtype,
        layers=own.layers,
        **fields,
    )
    write_chunk(path, header, layers)


def other_layers(change: Callable[[KV], list[KV]]) -> Callable[[Path, str], None]:
    """A sound file whose layers are those of another model, which has this one's fingerprint."""

    def forge(path: Path, model: str) -> None:
        with ChunkFile(path, model=model) as file:
            header = file.header
            pairs = [file.layer(index) for index in range(header.layers)]
        layers = [kept for pair in pairs for kept in change(pair)]
        write_chunk(path, replace(header, layers=len(layers)), layers)

    return forge


FAULTS: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "deleted": (delete, "is missing"),
    "truncated": (truncate, ""),
    "bit flipped": (flip_a_bit, ""),
    "another model": (another_model, "another model"),
    "one head": (other_layers(lambda kv: [(kv[0][:, :1], kv[1][:, :1])]), "a token in"),
    "short heads": (other_layers(lambda kv: [(kv[0], kv[1][..., :1])]), "a token in"),
    "long heads": (other_layers(lambda kv: [(kv[0].repeat(1, 1, 2), kv[1])]), "a token in"),
    "more layers": (other_layers(lambda kv: [kv, kv]), "the model has"),
}


def ask(engine: Engine, chunks: list[Stored], namespace: str) -> tuple[list[int], Completion]:
    prompt = [token for chunk in chunks for token in chunk.tokens] + QUESTION
    return prompt, blended(engine, prompt, namespace=namespace)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_chunk_file(engine: Engine, namespace: str, fault: str) -> None:
    damage, words = FAULTS[fault]
    tokens = [random_tokens(seed, 80) for seed in (1, 2, 3)]
    chunks = store_chunks(engine, tokens, namespace=namespace)
    assert engine.store is not None
    damage(engine.store.path(engine.fingerprint, namespace, chunks[1].id), engine.fingerprint)

    prompt, answer = ask(engine, chunks, namespace)
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None and words in answer.report.reason
    assert answer.report.reused_tokens == answer.report.exact_tokens == 0
    assert_same(answer, plain(engine, prompt))
    assert open_chunk_files(engine) == []

    # The bad chunk is not tried again; the others still serve.
    prompt, answer = ask(engine, [chunks[2], chunks[0], chunks[1]], namespace)
    assert answer.report.kv_cache == "hit"
    assert set(answer.report.chunk_ids) == {chunks[0].id, chunks[2].id}


def test_a_selector_that_fails(engine: Engine, namespace: str) -> None:
    chunks = store_chunks(engine, [random_tokens(seed, 80) for seed in (4, 5)], namespace=namespace)
    prompt = chunks[1].tokens + chunks[0].tokens + QUESTION
    before = counted(engine, "semkv_faults_total", "internal")
    answer = blended(engine, prompt, namespace=namespace, selector="failing")
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None
    assert answer.report.reason.startswith("the blend failed: ZeroDivisionError")
    assert counted(engine, "semkv_faults_total", "internal") == before + 1
    assert_same(answer, plain(engine, prompt))
    # It was not the chunks' fault.
    answer = blended(engine, prompt, namespace=namespace)
    assert set(answer.report.chunk_ids) == {chunk.id for chunk in chunks}


def test_evicted_between_plan_and_load(engine: Engine, namespace: str) -> None:
    """The index rows are still known to the scheduler, the files have just gone."""
    chunks = store_chunks(engine, [random_tokens(1, 120)], namespace=namespace)
    assert engine.store is not None
    ask(engine, [*chunks], namespace)
    shutil.rmtree(engine.store.path(engine.fingerprint, namespace, chunks[0].id).parent)
    prompt = random_tokens(5, 7) + chunks[0].tokens + QUESTION
    answer = blended(engine, prompt, namespace=namespace)
    assert answer.report.reason is not None and "missing" in answer.report.reason
    assert_same(answer, plain(engine, prompt))


def test_removed_by_another_process(engine: Engine, namespace: str) -> None:
    chunks = store_chunks(engine, [random_tokens(1, 120)], namespace=namespace)
    assert engine.store is not None
    assert ask(engine, chunks, namespace)[1].report.kv_cache == "hit"
    engine.store.remove(engine.fingerprint, namespace, [chunks[0].id])
    _, answer = ask(engine, chunks, namespace)
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason == "no stored chunk was found in the prompt"


def test_a_wrong_option_is_told_before_anything_runs(engine: Engine) -> None:
    from semkv_rag.errors import OptionError

    with pytest.raises(OptionError, match="no_such_field"):
        engine.generate([1, 2, 3], sampling={"no_such_field": 1})
    with pytest.raises(OptionError):
        engine.generate(random_tokens(1, 1100), sampling={"max_tokens": 4})


def test_the_disk_is_full_while_capturing(engine: Engine, namespace: str) -> None:
    """A chunk that cannot be written is an error in its result; the request itself goes on."""
    assert engine.store is not None
    tokens, context = token_array(random_tokens(1, 60)), token_array([])
    identity = chunk_id(engine.fingerprint, namespace, context, tokens)
    path = engine.store.path(engine.fingerprint, namespace, identity)
    item = CaptureItem(identity, namespace, "document", tokens, context)
    limit_file_size(engine, 4096)
    try:
        (result,) = engine.capture([item])
    finally:
        limit_file_size(engine, -1)
    assert result.error is not None
    assert "could not be written" in result.error
    assert list(path.parent.iterdir()) == []  # nothing half-written is left
    (again,) = engine.capture([item])
    assert again.error is None
    assert path.is_file()


async def test_a_file_that_is_torn_fails_no_blend_beside_it(engine: Engine, namespace: str) -> None:
    """Both blends' KV is settled, the one in the cache and the other lost, when they get their turn."""

    def wait_for_both(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        queue = get_kv_transfer_group().executor._queue
        advance = queue.advance

        def when_settled(budget: int, *, idle: bool) -> None:
            for blend in queue._active.values():
                blend.stored.settle()
            advance(budget, idle=idle)

        queue.advance = when_settled

    def stop(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        del get_kv_transfer_group().executor._queue.advance

    tokens = [random_tokens(seed, 90) for seed in (970, 971, 972)]
    chunks = store_chunks(engine, tokens, namespace=namespace)
    question = random_tokens(973, 12)
    prompts = [tokens[0] + tokens[1] + question, tokens[2] + tokens[0] + question]
    expected = blended(engine, prompts[1], namespace=namespace, ratio=0.2)
    engine.reset_prefix_cache()
    assert engine.store is not None
    truncate(engine.store.path(engine.fingerprint, namespace, chunks[1].id), "")
    options = ReuseOptions(namespace=namespace, ratio=0.2)
    inside(engine, wait_for_both)
    try:
        torn, whole = await asyncio.gather(
            *(engine.agenerate(prompt, sampling=SAMPLING, reuse=options) for prompt in prompts)
        )
    finally:
        inside(engine, stop)
    assert torn.report.kv_cache == "miss"
    assert_same(torn, plain(engine, prompts[0]))
    assert (whole.report.kv_cache, whole.report.reason) == ("hit", None)
    assert_same(whole, expected)
