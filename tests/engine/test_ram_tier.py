"""Chunks that stay in memory give the same answers, to all requests, and never another tenant's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.errors import OptionError
from workbench.answers import SAMPLING, assert_same, blended, counted, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import chunks_in_memory, inside, open_chunk_files

ROOM = 4
"""Chunks of 100 tokens that the memory has room for."""


@pytest.fixture(scope="module")
def small(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    """An engine with a RAM tier that holds few chunks."""
    model = tiny_model("qwen3")
    per_chunk = chunk_bytes(engines.get(model))
    with engines.own(model, ram_bytes=ROOM * per_chunk, max_num_seqs=2) as engine:
        yield engine


def chunk_bytes(engine: Engine) -> int:
    """What a chunk of 100 tokens takes, with its sensitivities and rounded up."""
    return -(-100 * token_bytes(engine) // 64) * 64


def token_bytes(engine: Engine) -> int:
    """What a token takes in a chunk: its K and V, and a sensitivity for each layer."""

    def layers(worker: Any) -> int:
        return int(worker.model_runner.model_config.hf_config.num_hidden_layers)

    return engine.kv_bytes_per_token + inside(engine, layers)


def prompt(chunks: list[Stored], seed: int) -> Tokens:
    return [
        token for part in [*(c.tokens for c in chunks), random_tokens(seed, 9)] for token in part
    ]


def chunks_of(engine: Engine, namespace: str, *seeds: int) -> list[Stored]:
    return store_chunks(
        engine,
        [random_tokens(seed, 100) for seed in seeds],
        namespace=namespace,
        reference=random_tokens(99, 40),
    )


def afresh(engine: Engine, asked: Tokens, namespace: str, **options: Any) -> Completion:
    engine.reset_prefix_cache()
    return blended(engine, asked, namespace=namespace, **options)


@pytest.mark.parametrize(
    "options",
    [{"ratio": 0.3}, {"selector": "kv_deviation", "ratio": 0.3}, {"selector": "none"}],
    ids=str,
)
def test_answers_are_the_same(small: Engine, namespace: str, options: dict[str, Any]) -> None:
    chunks = chunks_of(small, namespace, 1, 2, 3)
    asked = prompt(chunks, 800)
    first = afresh(small, asked, namespace, **options)
    before = counted(small, "semkv_loaded_bytes_total", "memory")
    again = afresh(small, asked, namespace, **options)
    loaded = counted(small, "semkv_loaded_bytes_total", "memory") - before
    assert loaded == again.report.memory_bytes > 0
    assert first.report.memory_bytes + first.report.file_bytes == 3 * 100 * token_bytes(small)
    assert again.report.file_bytes == 0
    assert again.report.memory_bytes == first.report.memory_bytes + first.report.file_bytes
    assert_same(again, first)
    assert open_chunk_files(small) == []


def test_it_is_what_an_engine_without_gives(
    small: Engine, engines: Engines, tiny_model: Callable[[str], Path], namespace: str
) -> None:
    other = engines.get(tiny_model("qwen3"))
    asked = prompt(chunks_of(small, namespace, 1, 2), 801)
    chunks_of(other, namespace, 1, 2)
    for _ in range(2):
        answer = afresh(small, asked, namespace, ratio=0.3)
        without = afresh(other, asked, namespace, ratio=0.3)
        assert_same(answer, without)
    assert without.report.memory_bytes == 0
    assert without.report.file_bytes == answer.report.memory_bytes > 0
    assert_same(afresh(small, asked, namespace, ratio=1.0), plain(small, asked))


def test_it_holds_what_was_used_last(small: Engine, namespace: str) -> None:
    chunks = chunks_of(small, namespace, *range(1, 7))
    for first in range(4):
        afresh(small, prompt(chunks[first : first + 3], 810 + first), namespace)
    assert {chunk_id for _, chunk_id in chunks_in_memory(small)} == {
        chunk.id for chunk in chunks[2:]
    }


def test_a_prompt_with_more_chunks_than_it_holds(small: Engine, namespace: str) -> None:
    chunks = chunks_of(small, namespace, *range(1, 7))
    asked = prompt(chunks, 820)
    answers = [afresh(small, asked, namespace, ratio=0.3) for _ in range(2)]
    for answer in answers:
        assert len(answer.report.chunk_ids) == 6
        assert answer.report.file_bytes > 0
    assert_same(*answers)
    assert len(chunks_in_memory(small)) == ROOM


def test_namespaces_share_nothing(small: Engine, namespace: str) -> None:
    other = f"{namespace}-other"
    chunks = chunks_of(small, namespace, 1, 2)
    asked = prompt(chunks, 830)
    afresh(small, asked, namespace)
    answer = afresh(small, asked, other)
    assert answer.report.kv_cache == "miss" and answer.report.memory_bytes == 0
    chunks_of(small, other, 1, 2)
    answer = afresh(small, asked, other)
    assert answer.report.kv_cache == "hit"
    assert {space for space, _ in chunks_in_memory(small)} == {namespace, other}


def test_a_removed_chunk_is_used_no_more(small: Engine, namespace: str) -> None:
    chunks = chunks_of(small, namespace, 1, 2)
    asked = prompt(chunks, 840)
    afresh(small, asked, namespace)
    assert small.store is not None
    small.store.remove(small.fingerprint, namespace, [chunks[0].id])
    answer = afresh(small, asked, namespace)
    assert answer.report.chunk_ids == (chunks[1].id,)


def test_a_damaged_chunk_never_enters(small: Engine, namespace: str) -> None:
    chunks = chunks_of(small, namespace, 1, 2, 3)
    assert small.store is not None
    path = small.store.path(small.fingerprint, namespace, chunks[1].id)
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)
    asked = prompt(chunks, 850)
    answer = afresh(small, asked, namespace)
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None and "checksum" in answer.report.reason
    assert answer.report.memory_bytes == 0
    assert_same(answer, plain(small, asked))
    assert chunks[1].id not in {chunk_id for _, chunk_id in chunks_in_memory(small)}
    assert open_chunk_files(small) == []
    # The bad chunk is not tried again; the others still serve.
    answer = afresh(small, prompt([chunks[2], chunks[0], chunks[1]], 851), namespace)
    assert set(answer.report.chunk_ids) == {chunks[0].id, chunks[2].id}


async def test_requests_side_by_side(small: Engine, namespace: str) -> None:
    chunks = chunks_of(small, namespace, 1, 2, 3)
    asked = [prompt(chunks[::order], 860 + index) for index in range(4) for order in (1, -1)]
    small.reset_prefix_cache()
    options = ReuseOptions(namespace=namespace, ratio=0.3)
    answers = await asyncio.gather(
        *(small.agenerate(one, sampling=SAMPLING, reuse=options) for one in asked)
    )
    for one, answer in zip(asked, answers, strict=True):
        assert_same(answer, await asyncio.to_thread(afresh, small, one, namespace, ratio=0.3))
    whole = 3 * 100 * token_bytes(small)
    assert sum(answer.report.file_bytes for answer in answers) <= whole
    assert {answer.report.memory_bytes + answer.report.file_bytes for answer in answers} == {whole}
    assert open_chunk_files(small) == []


async def test_chunks_are_read_while_a_request_waits(small: Engine, namespace: str) -> None:
    """Two requests run; of the third one the chunks are read before it has its turn."""
    chunks = chunks_of(small, namespace, 1, 2)
    long = {**SAMPLING, "max_tokens": 1900}
    off = ReuseOptions(enabled=False)
    enough = asyncio.Event()

    async def decode(seed: int, begun: asyncio.Event) -> None:
        async for _ in small.astream(random_tokens(seed, 20), sampling=long, reuse=off):
            begun.set()
            if enough.is_set():
                break

    begun = [asyncio.Event(), asyncio.Event()]
    running = [asyncio.create_task(decode(870 + index, event)) for index, event in enumerate(begun)]
    for event in begun:
        await event.wait()
    asked = asyncio.create_task(
        small.agenerate(
            prompt(chunks, 872), sampling=SAMPLING, reuse=ReuseOptions(namespace=namespace)
        )
    )
    wanted = {(namespace, chunk.id) for chunk in chunks}
    while not wanted <= set(await asyncio.to_thread(chunks_in_memory, small)):
        assert not any(one.done() for one in running)
        await asyncio.sleep(0.01)
    assert not any(one.done() for one in [asked, *running])
    enough.set()
    answer = await asked
    await asyncio.gather(*running)
    assert answer.report.kv_cache == "hit"
    assert answer.report.file_bytes == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "8GB", 1 << 60], ids=str)
def test_an_impossible_size_is_told_at_once(reader: Path, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(OptionError, match="ram_bytes"):
        Engine(str(reader), store=tmp_path, ram_bytes=wrong)


def test_without_a_store_there_is_nothing_to_keep(reader: Path) -> None:
    with pytest.raises(OptionError, match="store"):
        Engine(str(reader), ram_bytes=1 << 20)
