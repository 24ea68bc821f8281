"""vLLM's hybrid KV cache manager, which gives up blocks that a layer's window has left behind.

What blends and captures compute there is in `test_layer_kinds`, and with many requests at once in
`test_crowded`. Here is what becomes of the blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.corpus.capture import CaptureItem
from semkv_rag.engine import Completion, Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from semkv_rag.reuse import token_array
from workbench.answers import SAMPLING, assert_same, blended, counted, plain
from workbench.chunks import Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside
from workbench.poison import VALUES, poison
from workbench.tiered import tiered
from workbench.tiny_models import WINDOW

QUESTION = random_tokens(950, 9)
BLOCK = 32
GROUPS = 4
BLOCKS = 60
"""Enough for a blend of some 440 tokens."""


@pytest.fixture(scope="module")
def hybrid(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    args = {
        "num_gpu_blocks_override": BLOCKS,
        "block_size": BLOCK,
        "max_num_batched_tokens": 128,
        "max_model_len": 920,
    }
    with engines.own(tiny_model("gemma3_sliding"), **args) as engine:
        assert engine.gate.servable, engine.gate.reason
        assert groups(engine) == GROUPS
        yield engine


def groups(engine: Engine) -> int:
    def count(worker: object) -> int:
        return len(worker.model_runner.kv_cache_config.kv_cache_groups)  # type: ignore[attr-defined]

    return inside(engine, count)


def compute(engine: Engine, prompt: Tokens, namespace: str) -> Completion:
    """The answer without reuse; the prompt is in the namespace's prefix cache behind it."""
    options = ReuseOptions(enabled=False, namespace=namespace)
    return engine.generate(prompt, sampling=SAMPLING, reuse=options)


def all_given_back(engine: Engine) -> bool:
    """Whether no block is anybody's: only then vLLM empties its prefix cache."""
    return engine.reset_prefix_cache()


def test_every_block_is_given_back(hybrid: Engine, namespace: str) -> None:
    chunks = store_chunks(hybrid, [random_tokens(s, 90) for s in (951, 952)], namespace=namespace)
    assert all_given_back(hybrid)
    prompt = chunks[1].tokens + chunks[0].tokens + QUESTION
    assert blended(hybrid, prompt, namespace=namespace).report.kv_cache == "hit"
    assert all_given_back(hybrid)


def test_others_use_what_windows_leave(hybrid: Engine) -> None:
    """A prompt that is computed takes fewer blocks than all its tokens in all layers."""
    prompt = random_tokens(953, 900)
    assert GROUPS * len(prompt) > BLOCKS * BLOCK
    assert len(plain(hybrid, prompt).token_ids) == SAMPLING["max_tokens"]


def test_a_prompt_that_has_no_room_is_computed(hybrid: Engine, namespace: str) -> None:
    (chunk,) = store_chunks(hybrid, [random_tokens(954, 90)], namespace=namespace)
    prompt = chunk.tokens + random_tokens(955, 500) + QUESTION
    before = counted(hybrid, "semkv_plain_requests_total", "no_room")
    answer = blended(hybrid, prompt, namespace=namespace)
    assert answer.report.kv_cache == "miss" and answer.report.reused_tokens == 0
    assert answer.report.reason is not None and "no room" in answer.report.reason
    assert counted(hybrid, "semkv_plain_requests_total", "no_room") == before + 1
    assert_same(answer, plain(hybrid, prompt))
    assert all_given_back(hybrid)


async def test_who_finds_no_room_waits_for_it(hybrid: Engine, namespace: str) -> None:
    """Each takes more than half of the cache while it is blended, and nobody is computed."""
    chunks = store_chunks(hybrid, [random_tokens(s, 90) for s in (956, 957)], namespace=namespace)
    prompts = [
        chunks[1].tokens + random_tokens(960 + n, 90) + chunks[0].tokens + QUESTION
        for n in range(3)
    ]
    options = ReuseOptions(namespace=namespace, ratio=0.2)
    answers = await asyncio.gather(
        *(hybrid.agenerate(prompt, sampling=SAMPLING, reuse=options) for prompt in prompts)
    )
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.report.kv_cache == "hit", answer.report.reason
        hybrid.reset_prefix_cache()
        assert_same(answer, blended(hybrid, prompt, namespace=namespace, ratio=0.2))
    assert all_given_back(hybrid)


def test_what_stands_before_a_blend_in_the_prefix_cache(hybrid: Engine, namespace: str) -> None:
    """The window of a blend's first tokens is in blocks that its request has not got."""
    head = random_tokens(970, 3 * WINDOW + 5)
    chunks = store_chunks(hybrid, [random_tokens(s, 90) for s in (971, 972)], namespace=namespace)
    prompt = head + chunks[1].tokens + chunks[0].tokens + QUESTION
    alone = blended(hybrid, prompt, namespace=namespace, ratio=0.2)
    assert alone.report.cached_tokens == 0
    hybrid.reset_prefix_cache()
    compute(hybrid, head + QUESTION, namespace)
    again = blended(hybrid, prompt, namespace=namespace, ratio=0.2)
    assert again.report.cached_tokens == 3 * BLOCK
    assert_same(again, alone)
    assert all_given_back(hybrid)


def test_a_chunk_that_is_in_the_prefix_cache_is_captured(hybrid: Engine, namespace: str) -> None:
    """Windows' layers have left its first tokens behind when it is found there."""
    tokens, context = random_tokens(973, 130), random_tokens(974, 40)
    compute(hybrid, context + tokens + QUESTION, namespace)
    again = compute(hybrid, context + tokens + QUESTION, namespace)
    assert again.report.cached_tokens == 5 * BLOCK
    (chunk,) = store_chunks(hybrid, [tokens], namespace=namespace, context=context)
    prompt = context + chunk.tokens + QUESTION
    expected = plain(hybrid, prompt)
    hybrid.reset_prefix_cache()
    answer = blended(hybrid, prompt, namespace=namespace)
    assert answer.report.exact_tokens == len(tokens)
    assert_same(answer, expected)
    assert all_given_back(hybrid)


def test_captures_on_a_cache_that_is_too_small_for_all(hybrid: Engine, namespace: str) -> None:
    """Each keeps half of the cache until its chunk is whole; vLLM takes some back to let others go on."""
    tokens = [random_tokens(1100 + seed, 190) for seed in range(6)]
    chunks = store_chunks(hybrid, tokens, namespace=namespace, context=random_tokens(1099, 60))
    assert all_given_back(hybrid)
    prompt = chunks[4].context + chunks[4].tokens + QUESTION
    answer = blended(hybrid, prompt, namespace=namespace)
    assert answer.report.exact_tokens == len(chunks[4].tokens)
    assert_same(answer, plain(hybrid, prompt))


def test_a_chunk_that_the_cache_could_not_keep(hybrid: Engine, namespace: str) -> None:
    """It is computed all the same, in windows, and whoever asked is told."""
    tokens = token_array(random_tokens(1110, 600))
    item = CaptureItem("0" * 64, namespace, "document", tokens, token_array([]))
    (result,) = hybrid.capture([item])
    assert result.error is not None and "given up" in result.error
    assert all_given_back(hybrid)


def test_a_prompt_that_begins_in_the_prefix_cache_is_not_kept(
    hybrid: Engine, namespace: str
) -> None:
    """Captured in passing. Nobody computes its beginning, of which vLLM has given up blocks."""
    head = random_tokens(977, 130)
    prompt = head + random_tokens(978, 60)
    compute(hybrid, head + QUESTION, namespace)
    with tiered(hybrid, PromptCacheOptions()) as tiering:
        first = blended(hybrid, prompt, namespace=namespace)
        assert first.report.cached_tokens == 4 * BLOCK
        tiering.settle()
        assert all_given_back(hybrid)
        again = blended(hybrid, prompt, namespace=namespace)
        assert again.report.served_by is None
        tiering.settle()
        assert all_given_back(hybrid)
        kept = blended(hybrid, prompt, namespace=namespace)
    assert kept.report.served_by == "exact_text"
    assert kept.report.exact_tokens == len(prompt) - 1
    for answer in (first, again, kept):
        assert_same(answer, plain(hybrid, prompt))
    assert all_given_back(hybrid)


async def test_who_goes_away_gives_back_what_the_blend_had(hybrid: Engine, namespace: str) -> None:
    chunks = store_chunks(hybrid, [random_tokens(s, 90) for s in (975, 976)], namespace=namespace)
    options = ReuseOptions(namespace=namespace, ratio=0.2)

    async def ask(seed: int) -> None:
        prompt = chunks[1].tokens + chunks[0].tokens + random_tokens(seed, 9)
        await hybrid.agenerate(prompt, sampling=SAMPLING, reuse=options)

    for index in range(12):
        asked = asyncio.create_task(ask(980 + index))
        await asyncio.sleep(0.005 * index)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await ask(1000)
    assert all_given_back(hybrid)


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def huge(path: Path) -> None:
    poison(path, VALUES["huge"], 2, 0, slice(40, 44))


@pytest.mark.parametrize(
    ("damage", "words"), [(torn, ""), (huge, "no numbers")], ids=["torn", "huge"]
)
async def test_what_cannot_be_used_is_computed(
    hybrid: Engine, namespace: str, damage: Callable[[Path], None], words: str
) -> None:
    tokens = [random_tokens(s, 90) for s in (990, 991, 992)]
    chunks = store_chunks(hybrid, tokens, namespace=namespace)
    prompts: list[Tokens] = [
        chunks[0].tokens + chunks[1].tokens + QUESTION,
        chunks[2].tokens + chunks[0].tokens + QUESTION,
    ]
    expected = blended(hybrid, prompts[1], namespace=namespace, ratio=0.2)
    hybrid.reset_prefix_cache()
    assert hybrid.store is not None
    damage(hybrid.store.path(hybrid.fingerprint, namespace, chunks[1].id))
    options = ReuseOptions(namespace=namespace, ratio=0.2)
    answers: list[Completion] = await asyncio.gather(
        *(hybrid.agenerate(prompt, sampling=SAMPLING, reuse=options) for prompt in prompts)
    )
    assert answers[0].report.kv_cache == "miss"
    assert answers[0].report.reason is not None and words in answers[0].report.reason
    assert_same(answers[0], plain(hybrid, prompts[0]))
    assert answers[1].report.kv_cache == "hit"
    assert_same(answers[1], expected)
    assert all_given_back(hybrid)
