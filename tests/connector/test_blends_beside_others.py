"""A blend takes what other requests leave of the steps, and nothing of it is left when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from workbench.answers import SAMPLING, assert_same, blended, counted, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import blend_steps, inside, open_chunk_files

LONG = {**SAMPLING, "max_tokens": 60}
OPTIONS = [
    {"ratio": 0.5, "selector": "sensitivity_attention"},
    {"ratio": 0.5, "selector": "kv_deviation"},
    {"ratio": "auto", "promise": 1e-9, "selector": "sensitivity_attention"},
]


@dataclass
class Few:
    """An engine with small steps, and a cache of 40 blocks."""

    engine: Engine
    chunks: list[Stored]

    def prompt(self, seed: int, chunks: slice = slice(None)) -> Tokens:
        parts = [*self.chunks[chunks], random_tokens(seed, 9)]
        return [
            token for part in parts for token in (part if isinstance(part, list) else part.tokens)
        ]

    async def decode(self, seed: int, begun: asyncio.Event) -> Completion:
        """A request that decodes beside others, from `begun` on."""
        parts = []
        async for part in self.engine.astream(
            random_tokens(seed, 20), sampling=LONG, reuse=ReuseOptions(enabled=False)
        ):
            parts.append(part)
            begun.set()
        return parts[-1]

    def stalls(self) -> float:
        """Steps with others that blends were computed in."""
        return counted(self.engine, "semkv_stall_seconds", "count")

    def blends_left(self) -> list[str]:
        def left(worker: Any) -> list[str]:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            return list(get_kv_transfer_group().executor._blend_pass.setting.in_blends)

        return inside(self.engine, left)


@pytest.fixture(scope="module")
def few(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Few]:
    args = {
        "num_gpu_blocks_override": 40,
        "block_size": 32,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    with engines.own(tiny_model("qwen3"), **args) as engine:
        tokens = [random_tokens(seed, 100) for seed in range(6)]
        yield Few(engine, store_chunks(engine, tokens, namespace="default"))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_a_blend_is_cut_to_what_others_leave(few: Few, options: dict[str, Any]) -> None:
    prompt, other = few.prompt(700), random_tokens(701, 20)
    alone = blended(few.engine, prompt, **options)
    beside = few.engine.generate(other, sampling=LONG, reuse=ReuseOptions(enabled=False))
    few.engine.reset_prefix_cache()
    begun = asyncio.Event()
    stalls = few.stalls()
    with blend_steps(few.engine) as steps:
        decoding = asyncio.create_task(few.decode(701, begun))
        await begun.wait()
        answer = await few.engine.agenerate(
            prompt, sampling=SAMPLING, reuse=ReuseOptions(**options)
        )
        await decoding
    # 250 picked tokens or more, 63 a step, while each step gives the other request its token.
    assert len([step for step in steps if step.under_way and not step.idle]) >= 4
    assert few.stalls() >= stalls + 4
    assert answer.report.recomputed_tokens == alone.report.recomputed_tokens >= 250
    assert_same(answer, alone)
    assert (
        beside.token_ids[:4]
        == few.engine.generate(
            other, sampling=SAMPLING, reuse=ReuseOptions(enabled=False)
        ).token_ids
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_blends_of_several_go_in_one_forward(few: Few, options: dict[str, Any]) -> None:
    prompts = [few.prompt(730 + n, slice(n, n + 2)) for n in range(4)]
    alone = [blended(few.engine, prompt, **options) for prompt in prompts]
    few.engine.reset_prefix_cache()
    begun = asyncio.Event()
    with blend_steps(few.engine) as steps:
        decoding = asyncio.create_task(few.decode(734, begun))
        await begun.wait()  # so that all of them have their KV when their turn comes
        answers = await asyncio.gather(
            *(
                few.engine.agenerate(prompt, sampling=SAMPLING, reuse=ReuseOptions(**options))
                for prompt in prompts
            )
        )
        await decoding
    assert max(requests for step in steps for requests in step.together) >= 2
    for answer, expected in zip(answers, alone, strict=True):
        assert answer.report.recomputed_tokens == expected.report.recomputed_tokens
        assert_same(answer, expected)


async def test_prompts_that_are_the_same_are_blended_once(few: Few) -> None:
    prompt = few.prompt(702)
    few.engine.reset_prefix_cache()
    with blend_steps(few.engine) as steps:
        answers = await asyncio.gather(
            *(
                few.engine.agenerate(prompt, sampling=SAMPLING, reuse=ReuseOptions(ratio=0.3))
                for _ in range(3)
            )
        )
    cached = sorted(answer.report.cached_tokens for answer in answers)
    assert cached[0] == 0 and cached[1] > 500
    for answer in answers[1:]:
        assert_same(answer, answers[0])
    # What is behind the last whole block of the plan is blended for each of them.
    assert sum(step.began for step in steps) <= 3


async def test_a_request_that_leaves_takes_its_blend_with_it(few: Few) -> None:
    few.engine.reset_prefix_cache()
    begun = asyncio.Event()
    decoding = asyncio.create_task(few.decode(703, begun))
    await begun.wait()
    for seed in range(704, 716):  # 20 blocks each, of 40
        asked = asyncio.create_task(
            few.engine.agenerate(few.prompt(seed), sampling=SAMPLING, reuse=ReuseOptions(ratio=0.9))
        )
        await asyncio.sleep(0.02)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    await decoding
    prompt = few.prompt(716)
    answer = await few.engine.agenerate(prompt, sampling=SAMPLING, reuse=ReuseOptions(ratio=1.0))
    assert_same(answer, plain(few.engine, prompt))
    # All of the cache can be had again.
    whole = random_tokens(717, 950)
    assert_same(plain(few.engine, whole), plain(few.engine, whole))
    assert few.blends_left() == []
    assert open_chunk_files(few.engine) == []


async def test_a_blend_that_fails_is_computed_beside_others(few: Few) -> None:
    chunk = store_chunks(few.engine, [random_tokens(50, 100)], namespace="default")[0]
    prompt = few.prompt(718, slice(2)) + chunk.tokens + random_tokens(719, 9)
    few.engine.reset_prefix_cache()
    assert few.engine.store is not None
    few.engine.store.path(few.engine.fingerprint, "default", chunk.id).unlink()
    begun = asyncio.Event()
    decoding = asyncio.create_task(few.decode(720, begun))
    await begun.wait()
    answer = await few.engine.agenerate(prompt, sampling=SAMPLING, reuse=ReuseOptions(ratio=0.3))
    await decoding
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None and "missing" in answer.report.reason
    assert_same(answer, plain(few.engine, prompt))
    assert few.blends_left() == []


def test_keys_that_were_not_kept_are_read_back(few: Few) -> None:
    """A blend that loads more than may be kept asks the cache."""

    def keep(size_bytes: int) -> Callable[[Any], None]:
        def set_bytes(worker: Any) -> None:
            from semkv_rag.connector.worker.blend import setting

            setting.KEPT_KEYS_BYTES = size_bytes

        return set_bytes

    def forget_choices(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().executor._blend_pass.picked.clear()

    prompt = few.prompt(721)
    few.engine.reset_prefix_cache()
    first = blended(few.engine, prompt, ratio=0.3)
    inside(few.engine, forget_choices)
    few.engine.reset_prefix_cache()
    inside(few.engine, keep(0))
    try:
        assert_same(blended(few.engine, prompt, ratio=0.3), first)
    finally:
        inside(few.engine, keep(256 << 20))
