"""Models whose layers are of other kinds than plain attention: with sliding windows, and with latents.

Among those with windows are attention sinks, two rotary bases, a cap of logits, windows in all layers.
Windows are of 32 tokens and prompts of some 300, so that nothing here is right if a window is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion
from semkv_rag.reuse import ReusePlan, Span
from tests.connector.pairs import Pair, assert_logprobs, plan_of
from tests.reference import ReferenceModel, masked
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.fake_device import install
from workbench.inside import inside, picked_positions
from workbench.tiny_models import LATENT, QWEN_VL, THREE_ROWS, WINDOW, WINDOWED
from workbench.vision import of_qwen

PREFIX = random_tokens(900, 50)
OTHER = random_tokens(899, 40)
KINDS = (*WINDOWED, *LATENT, *THREE_ROWS, *QWEN_VL)
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}
"""Without vLLM's hybrid KV cache manager: the blocks of all tokens are kept in all layers."""
CASES: dict[str, tuple[str, dict[str, object]]] = {
    **{arch: (arch, {}) for arch in KINDS},
    **{f"{arch}, one group": (arch, ONE_GROUP) for arch in WINDOWED},
    # A chunk is computed over several steps, between which its first blocks are given up.
    "gemma3_sliding, small steps": ("gemma3_sliding", {"max_num_batched_tokens": 48}),
}
ON_DEVICE = tuple(f"{arch}, on a device" for arch in KINDS)
"""Tensors of a device and of the host do not mix; see `workbench.fake_device`."""
CASES |= {case: (arch, {}) for case, arch in zip(ON_DEVICE, KINDS, strict=True)}
IN_SOAK = (
    "gemma2_sliding, one group",
    "mistral_sliding, one group",
    "deepseek_v3",
    *ON_DEVICE,
)


def marks(case: str) -> Sequence[pytest.MarkDecorator]:
    if CASES[case][0] in QWEN_VL:
        return of_qwen
    return [pytest.mark.soak] if case in IN_SOAK else []


class Stocked(Pair):
    """The last chunk is stored behind `PREFIX`."""

    def prompt(self, seed: int = 0) -> tuple[Tokens, list[Span]]:
        """An exact span, three others in another order, the last one cut, with text around them."""
        exact = self.chunks[3]
        spans = [Span(exact.id, 0, len(PREFIX), len(exact.tokens), base=len(PREFIX), exact=True)]
        prompt = PREFIX + exact.tokens
        for chunk, src, length in ((1, 0, 77), (0, 0, 70), (2, 9, 60)):
            prompt = prompt + random_tokens(901 + length, 3)
            spans.append(self.chunks[chunk].at(len(prompt), src=src, length=length))
            prompt = prompt + self.chunks[chunk].tokens[src : src + length]
        return prompt + random_tokens(910 + seed, 9), spans

    def plan(self, tokens: Tokens, spans: list[Span], **options: object) -> ReusePlan:
        return plan_of(tokens, spans, ReuseOptions(**options))  # type: ignore[arg-type]


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=marks(case), id=case) for case in CASES],
)
def stocked(
    request: pytest.FixtureRequest, engines: Engines, tiny_model: Callable[[str], Path]
) -> Iterator[Stocked]:
    arch, args = CASES[request.param]
    folder = tiny_model(arch)
    with engines.own(folder, **args) as engine:
        assert engine.gate.servable, engine.gate.reason
        if request.param in ON_DEVICE:
            assert inside(engine, install) == (True, None)
        tokens = [random_tokens(seed, 70 + 7 * seed) for seed in range(4)]
        chunks = store_chunks(engine, tokens[:3], namespace="default", reference=OTHER)
        chunks += store_chunks(engine, tokens[3:], namespace="default", context=PREFIX)
        reference = ReferenceModel(folder)
        stored = {c.id: reference.compared(c.context, c.tokens, OTHER) for c in chunks[:3]}
        stored[chunks[3].id] = reference.stored(PREFIX, chunks[3].tokens)
        yield Stocked(engine, reference, chunks, stored, arch not in LATENT)


def test_the_gate_moves_keys_and_attends_exactly(stocked: Stocked) -> None:
    """On every layer, with its own rotation; and beyond the window."""
    assert 0 < stocked.engine.gate.largest_error < 1e-4


def test_recomputing_everything_is_plain(stocked: Stocked) -> None:
    tokens, _ = stocked.prompt()
    expected = plain(stocked.engine, tokens)
    assert_logprobs(expected, stocked.reference.logprobs(tokens))
    for options in ({"ratio": 1.0}, {"selector": "all"}):
        stocked.engine.reset_prefix_cache()
        answer = blended(stocked.engine, tokens, **options)
        assert answer.report.recomputed_tokens == answer.report.reused_tokens == 207
        assert answer.report.exact_tokens == len(stocked.chunks[3].tokens)
        assert_same(answer, expected)


def test_exact_spans_are_plain(stocked: Stocked) -> None:
    tokens = PREFIX + stocked.chunks[3].tokens + random_tokens(912, 2 * WINDOW)
    stocked.engine.reset_prefix_cache()
    answer = blended(stocked.engine, tokens)
    assert answer.report.exact_tokens == len(stocked.chunks[3].tokens)
    assert_same(answer, plain(stocked.engine, tokens))


def test_none_is_block_diagonal_attention(stocked: Stocked) -> None:
    tokens, spans = stocked.prompt()
    stocked.engine.reset_prefix_cache()
    answer = blended(stocked.engine, tokens, selector="none")
    assert answer.report.recomputed_tokens == 0
    plan = stocked.plan(tokens, spans, selector="none")
    expected = masked(stocked.reference, tokens, plan, stocked.stored)
    assert_logprobs(answer, expected)
    assert (expected - stocked.reference.logprobs(tokens)).abs().max() > 1e-2


LOOKING: list[dict[str, object]] = [
    {"selector": "sensitivity_attention", "ratio": 0.15},
    {"selector": "query_attention", "ratio": 0.3, "question_tokens": 30},
    {"selector": "kv_deviation", "ratio": 0.15},
]


def assert_as_reference(
    stocked: Stocked, answer: Completion, tokens: Tokens, plan: ReusePlan
) -> None:
    expected = stocked.reference.blend(tokens, plan, stocked.stored)
    assert picked_positions(stocked.engine, plan, tokens) == list(expected.picked)
    assert_logprobs(answer, expected.logprobs)


@pytest.mark.soak
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=marks(arch)) for arch in KINDS])
def test_bfloat16_gives_the_same_tokens(
    arch: str, engines: Engines, tiny_model: Callable[[str], Path]
) -> None:
    with engines.own(tiny_model(arch), dtype="bfloat16") as engine:
        assert engine.gate.servable, engine.gate.reason
        chunks = [random_tokens(seed, 70 + 7 * seed) for seed in range(3)]
        stored = store_chunks(engine, chunks, namespace="default")
        tokens = [token for chunk in stored[::-1] for token in chunk.tokens]
        tokens += random_tokens(913, 9)
        answer = blended(engine, tokens, ratio=1.0)
        assert answer.report.recomputed_tokens == answer.report.reused_tokens > 100
        assert answer.token_ids == plain(engine, tokens).token_ids


async def test_several_at_once_pick_what_the_reference_picks(stocked: Stocked) -> None:
    stocked.engine.reset_prefix_cache()
    asked = [(*stocked.prompt(seed), options) for seed, options in enumerate(LOOKING)]
    answers = await asyncio.gather(
        *(
            stocked.engine.agenerate(
                tokens,
                sampling=SAMPLING,
                reuse=ReuseOptions(**options),  # type: ignore[arg-type]
            )
            for tokens, _, options in asked
        )
    )
    for answer, (tokens, spans, options) in zip(answers, asked, strict=True):
        assert_as_reference(stocked, answer, tokens, stocked.plan(tokens, spans, **options))


def test_the_prefix_cache_stays_exact(stocked: Stocked) -> None:
    tokens, spans = stocked.prompt()
    expected = plain(stocked.engine, tokens)
    stocked.engine.reset_prefix_cache()
    for options in (*LOOKING, {"selector": "none"}):
        blended(stocked.engine, tokens, **options)
    ordinary = stocked.engine.generate(tokens, sampling=SAMPLING, reuse=ReuseOptions(enabled=False))
    if not stocked.caches:
        assert ordinary.report.cached_tokens == 0
        assert_same(ordinary, expected)
        return
    # Up to the first token that was not exact, blocks are shared with the blends.
    assert WINDOW < ordinary.report.cached_tokens <= spans[1].dst
    assert_same(ordinary, expected)
    again = blended(stocked.engine, tokens, **LOOKING[0])
    assert again.report.cached_tokens > spans[1].dst
    assert_as_reference(stocked, again, tokens, stocked.plan(tokens, spans, **LOOKING[0]))
