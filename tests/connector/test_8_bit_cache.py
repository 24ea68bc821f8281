"""An 8-bit KV cache (`kv_cache_dtype="fp8"`): answers as plain vLLM's. On a CPU it needs AVX-512.

A token's K and V are rounded alike in a blend and in plain prefill. A key that is moved is rounded twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.answers import SAMPLING, blended, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has no 8-bit cache on this CPU"
)

SERVED = (
    "llama",
    "qwen3",
    "qwen2_yarn",
    "qwen2_moe",
    "gemma2",
    "gptj",
    "olmo2",
    "glm",
    "phi",
    "gemma2_sliding",
    "gemma3_sliding",
    "gpt_oss",
    "mistral_sliding",
    "paddleocr_vl",
)
ALWAYS = (("llama", "fp8"), ("gemma3_sliding", "fp8"))
CASES = [*((arch, "fp8") for arch in SERVED), ("llama", "fp8_e5m2")]
PREFIX = random_tokens(900, 50)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=() if case in ALWAYS else pytest.mark.soak, id="-".join(case))
        for case in CASES
    ],
)
def served(
    request: pytest.FixtureRequest, engines: Engines, tiny_model: Callable[[str], Path]
) -> Iterator[tuple[Engine, list[Stored], Stored]]:
    arch, kept = request.param
    with engines.own(tiny_model(arch), dtype="bfloat16", kv_cache_dtype=kept) as engine:
        assert engine.gate.servable, engine.gate.reason
        tokens = [random_tokens(seed, 70 + 7 * seed) for seed in range(4)]
        chunks = store_chunks(engine, tokens[:3], namespace="default")
        (exact,) = store_chunks(engine, tokens[3:], namespace="default", context=PREFIX)
        yield engine, chunks, exact


def prompt_of(chunks: list[Stored], seed: int) -> Tokens:
    tokens = [token for chunk in chunks for token in random_tokens(910 + seed, 3) + chunk.tokens]
    return tokens + random_tokens(920 + seed, 9)


def test_recomputing_everything_is_plain(served: tuple[Engine, list[Stored], Stored]) -> None:
    engine, chunks, _ = served
    tokens = prompt_of(chunks[::-1], seed=0)
    for options in ({"selector": "all"}, {"ratio": 1.0}):
        engine.reset_prefix_cache()
        answer = blended(engine, tokens, **options)
        assert answer.report.recomputed_tokens == answer.report.reused_tokens > 200
        assert answer.token_ids == plain(engine, tokens).token_ids


def test_exact_spans_are_plain(served: tuple[Engine, list[Stored], Stored]) -> None:
    engine, _, exact = served
    tokens = PREFIX + exact.tokens + random_tokens(930, 40)
    engine.reset_prefix_cache()
    answer = blended(engine, tokens)
    assert answer.report.exact_tokens == len(exact.tokens)
    assert answer.token_ids == plain(engine, tokens).token_ids


async def test_several_at_once_beside_blends(served: tuple[Engine, list[Stored], Stored]) -> None:
    """Blends that lose something, and others that do not, which answer as plain vLLM."""
    engine, chunks, _ = served
    prompts = [prompt_of(chunks[turn:] + chunks[:turn], seed=turn) for turn in range(3)]
    right = [plain(engine, tokens).token_ids for tokens in prompts]
    engine.reset_prefix_cache()
    asked = [(tokens, ratio) for tokens in prompts for ratio in (0.15, 1.0)]
    answers = await asyncio.gather(
        *(
            engine.agenerate(tokens, sampling=SAMPLING, reuse=ReuseOptions(ratio=ratio))
            for tokens, ratio in asked
        )
    )
    for answer, (_, ratio) in zip(answers, asked, strict=True):
        assert answer.report.kv_cache == "hit", answer.report
        assert answer.report.reused_tokens > 200
        assert (answer.report.recomputed_tokens < answer.report.reused_tokens) == (ratio < 1)
    assert [answer.token_ids for answer in answers[1::2]] == right
