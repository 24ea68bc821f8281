"""Models with sliding windows: attention sinks, two rotary bases, a cap of logits, windows in all layers.

Windows are of 32 tokens and prompts of some 300, so that nothing here is right if a window is not kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
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
from workbench.inside import picked_positions
from workbench.tiny_models import WINDOW, WINDOWED

PREFIX = random_tokens(900, 50)
OTHER = random_tokens(899, 40)


class Windowed(Pair):
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


@pytest.fixture(scope="module", params=WINDOWED)
def windowed(
    request: pytest.FixtureRequest, engines: Engines, tiny_model: Callable[[str], Path]
) -> Iterator[Windowed]:
    folder = tiny_model(request.param)
    with engines.own(folder) as engine:
        assert engine.gate.servable, engine.gate.reason
        tokens = [random_tokens(seed, 70 + 7 * seed) for seed in range(4)]
        chunks = store_chunks(engine, tokens[:3], namespace="default", reference=OTHER)
        chunks += store_chunks(engine, tokens[3:], namespace="default", context=PREFIX)
        reference = ReferenceModel(folder)
        stored = {c.id: reference.compared(c.context, c.tokens, OTHER) for c in chunks[:3]}
        stored[chunks[3].id] = reference.stored(PREFIX, chunks[3].tokens)
        yield Windowed(engine, reference, chunks, stored)


def test_the_gate_moves_keys_and_attends_exactly(windowed: Windowed) -> None:
    """On every layer, with its own rotation; and beyond the window."""
    assert 0 < windowed.engine.gate.largest_error < 1e-4


def test_recomputing_everything_is_plain(windowed: Windowed) -> None:
    tokens, _ = windowed.prompt()
    expected = plain(windowed.engine, tokens)
    assert_logprobs(expected, windowed.reference.logprobs(tokens))
    for options in ({"ratio": 1.0}, {"selector": "all"}):
        windowed.engine.reset_prefix_cache()
        answer = blended(windowed.engine, tokens, **options)
        assert answer.report.recomputed_tokens == answer.report.reused_tokens == 207
        assert answer.report.exact_tokens == len(windowed.chunks[3].tokens)
        assert_same(answer, expected)


def test_exact_spans_are_plain(windowed: Windowed) -> None:
    tokens = PREFIX + windowed.chunks[3].tokens + random_tokens(912, 2 * WINDOW)
    windowed.engine.reset_prefix_cache()
    answer = blended(windowed.engine, tokens)
    assert answer.report.exact_tokens == len(windowed.chunks[3].tokens)
    assert_same(answer, plain(windowed.engine, tokens))


def test_none_is_block_diagonal_attention(windowed: Windowed) -> None:
    tokens, spans = windowed.prompt()
    windowed.engine.reset_prefix_cache()
    answer = blended(windowed.engine, tokens, selector="none")
    assert answer.report.recomputed_tokens == 0
    plan = windowed.plan(tokens, spans, selector="none")
    expected = masked(windowed.reference, tokens, plan, windowed.stored)
    assert_logprobs(answer, expected)
    assert (expected - windowed.reference.logprobs(tokens)).abs().max() > 1e-2


LOOKING: list[dict[str, object]] = [
    {"selector": "sensitivity_attention", "ratio": 0.15},
    {"selector": "query_attention", "ratio": 0.3, "question_tokens": 30},
    {"selector": "kv_deviation", "ratio": 0.15},
]


def assert_as_reference(
    windowed: Windowed, answer: Completion, tokens: Tokens, plan: ReusePlan
) -> None:
    expected = windowed.reference.blend(tokens, plan, windowed.stored)
    assert picked_positions(windowed.engine, plan, tokens) == list(expected.picked)
    assert_logprobs(answer, expected.logprobs)


@pytest.mark.soak
@pytest.mark.parametrize("arch", WINDOWED)
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


async def test_several_at_once_pick_what_the_reference_picks(windowed: Windowed) -> None:
    windowed.engine.reset_prefix_cache()
    asked = [(*windowed.prompt(seed), options) for seed, options in enumerate(LOOKING)]
    answers = await asyncio.gather(
        *(
            windowed.engine.agenerate(
                tokens,
                sampling=SAMPLING,
                reuse=ReuseOptions(**options),  # type: ignore[arg-type]
            )
            for tokens, _, options in asked
        )
    )
    for answer, (tokens, spans, options) in zip(answers, asked, strict=True):
        assert_as_reference(windowed, answer, tokens, windowed.plan(tokens, spans, **options))


def test_the_prefix_cache_stays_exact(windowed: Windowed) -> None:
    tokens, spans = windowed.prompt()
    expected = plain(windowed.engine, tokens)
    windowed.engine.reset_prefix_cache()
    for options in (*LOOKING, {"selector": "none"}):
        blended(windowed.engine, tokens, **options)
    ordinary = windowed.engine.generate(
        tokens, sampling=SAMPLING, reuse=ReuseOptions(enabled=False)
    )
    # Up to the first token that was not exact, blocks are shared with the blends.
    assert WINDOW < ordinary.report.cached_tokens <= spans[1].dst
    assert_same(ordinary, expected)
    again = blended(windowed.engine, tokens, **LOOKING[0])
    assert again.report.cached_tokens > spans[1].dst
    assert_as_reference(windowed, again, tokens, windowed.plan(tokens, spans, **LOOKING[0]))
