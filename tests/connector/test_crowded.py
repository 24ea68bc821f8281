"""Many requests at once on a cache that is too small for them: preemption, chunked prefill, aborts.

Every request must answer as it does alone, on one rank and on two.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.engine.completion import join
from workbench.answers import assert_same
from workbench.chunks import Tokens, random_tokens, store_chunks
from workbench.engines import Engines, own_on_ranks
from workbench.inside import open_chunk_files
from workbench.tiny_models import LATENT, QWEN_VL, THREE_ROWS, WINDOWED
from workbench.vision import of_qwen

SAMPLING = {"temperature": 0.0, "max_tokens": 24, "logprobs": 5, "ignore_eos": True}
REQUESTS = 32
TWO_RANKS = {
    "qwen3, tensor parallel": {"tensor_parallel_size": 2},
    "qwen3, pipeline": {"pipeline_parallel_size": 2},
}
BLOCKS = {"gemma3_sliding": 60, "mistral_sliding": 20}
"""Where windows have groups of their own: so many that a few requests fit, and any one's blend."""
IN_SOAK = (*TWO_RANKS, *WINDOWED, *LATENT, *THREE_ROWS)


@dataclass
class Crowd:
    engine: Engine
    prompts: list[Tokens]
    options: list[ReuseOptions]


@pytest.fixture(
    scope="module",
    params=[
        "qwen3",
        *(pytest.param(arch, marks=pytest.mark.soak) for arch in IN_SOAK),
        *(pytest.param(arch, marks=of_qwen) for arch in QWEN_VL),
    ],
)
def crowd(
    request: pytest.FixtureRequest, engines: Engines, tiny_model: Callable[[str], Path]
) -> Iterator[Crowd]:
    arch, sizes = request.param.partition(",")[0], TWO_RANKS.get(request.param)
    # About four of the requests below fit at a time: of most models 40 blocks of 32 tokens.
    blocks = BLOCKS.get(arch, 40)
    args = {"num_gpu_blocks_override": blocks, "block_size": 32, "max_num_seqs": 16}
    if arch in LATENT:  # on a CPU without AMX in blocks of 16, and no prompt in parts
        args |= {"num_gpu_blocks_override": 80, "block_size": 16}
    else:
        args |= {"max_num_batched_tokens": 128}
    with contextlib.ExitStack() as ends:
        if sizes is None:
            engine = ends.enter_context(engines.own(tiny_model(arch), **args))
        else:
            engine = ends.enter_context(own_on_ranks(engines, tiny_model(arch), sizes, **args))
        assert engine.gate.servable, engine.gate.reason
        tokens = [random_tokens(seed, 70 + seed) for seed in range(6)]
        contexts = random_tokens(50, 30), random_tokens(51, 30)
        chunks = store_chunks(
            engine, tokens, namespace="default", context=contexts[0], reference=contexts[1]
        )
        prompts, options = [], []
        for index in range(REQUESTS):
            own = [chunks[(index + k) % 6].tokens for k in range(index % 3 + 1)]
            between = random_tokens(100 + index, 4)
            prompt = [token for chunk in own for token in [*chunk, *between]]
            prompts.append(prompt + random_tokens(200 + index, 7))
            options.append(
                [
                    ReuseOptions(ratio=0.2),
                    ReuseOptions(ratio="auto", promise=0.01),
                    ReuseOptions(enabled=False),
                    ReuseOptions(selector="none"),
                    ReuseOptions(selector="by_chance", ratio=0.3),
                    ReuseOptions(selector="deviation_x_attention", ratio=0.2),
                    ReuseOptions(selector="kv_deviation", ratio=0.3),
                ][index % 7]
            )
        yield Crowd(engine, prompts, options)


@pytest.fixture(scope="module")
def alone(crowd: Crowd) -> list[Completion]:
    """Each request's answer with the engine to itself and nothing cached."""
    answers = []
    for prompt, options in zip(crowd.prompts, crowd.options, strict=True):
        crowd.engine.reset_prefix_cache()
        answers.append(crowd.engine.generate(prompt, sampling=SAMPLING, reuse=options))
    return answers


async def test_everybody_answers_as_alone(crowd: Crowd, alone: list[Completion]) -> None:
    crowd.engine.reset_prefix_cache()

    async def ask(index: int) -> Completion:
        prompt, options = crowd.prompts[index], crowd.options[index]
        if index % 5:
            return await crowd.engine.agenerate(prompt, sampling=SAMPLING, reuse=options)
        parts = [
            part async for part in crowd.engine.astream(prompt, sampling=SAMPLING, reuse=options)
        ]
        assert len(parts) > 1
        return join(parts)

    answers = await asyncio.gather(*(ask(index) for index in range(REQUESTS)))
    # Else the cache was large enough for everybody, and blends were never started again.
    assert any(answer.report.preemptions and answer.report.chunk_ids for answer in answers)
    for answer, right in zip(answers, alone, strict=True):
        assert answer.report.kv_cache == right.report.kv_cache
        assert_same(answer, right)
    assert open_chunk_files(crowd.engine) == []


def test_from_many_threads(crowd: Crowd, alone: list[Completion]) -> None:
    answers: dict[int, Completion] = {}

    def ask(index: int) -> None:
        answers[index] = crowd.engine.generate(
            crowd.prompts[index], sampling=SAMPLING, reuse=crowd.options[index]
        )

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for index in range(16):
        assert_same(answers[index], alone[index])


async def test_aborted_requests_leave_the_others_alone(
    crowd: Crowd, alone: list[Completion]
) -> None:
    crowd.engine.reset_prefix_cache()
    tasks = [
        asyncio.create_task(
            crowd.engine.agenerate(
                crowd.prompts[index], sampling=SAMPLING, reuse=crowd.options[index]
            )
        )
        for index in range(REQUESTS)
    ]
    await asyncio.sleep(0.05)
    for task in tasks[::3]:
        task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    for index, answer in enumerate(answers):
        if index % 3 == 0 and isinstance(answer, asyncio.CancelledError):
            continue
        assert isinstance(answer, Completion)
        assert_same(answer, alone[index])
    # Nothing is left behind: the engine answers as ever.
    again = await crowd.engine.agenerate(
        crowd.prompts[0], sampling=SAMPLING, reuse=crowd.options[0]
    )
    assert_same(again, alone[0])


async def test_a_stream_that_is_left_is_aborted(crowd: Crowd, alone: list[Completion]) -> None:
    async for _ in crowd.engine.astream(
        crowd.prompts[2], sampling={**SAMPLING, "max_tokens": 400}, reuse=crowd.options[2]
    ):
        break
    for part in crowd.engine.stream(
        crowd.prompts[2], sampling={**SAMPLING, "max_tokens": 400}, reuse=crowd.options[2]
    ):
        assert part.token_ids
        break
    answer = crowd.engine.generate(crowd.prompts[2], sampling=SAMPLING, reuse=crowd.options[2])
    assert_same(answer, alone[2])
