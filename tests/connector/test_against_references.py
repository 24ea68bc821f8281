"""The blend equals plain-PyTorch references that share no code with it: rows and logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from semkv_rag.blend import SAMPLED, BlendShape, charged_ratio, expected_loss, selector_type
from semkv_rag.config import FIRST_RATIO, ReuseOptions
from semkv_rag.engine import Completion
from semkv_rag.reuse import ReusePlan, Span
from semkv_rag.selectors import SELECTORS
from tests.connector.pairs import Pair, assert_logprobs, plan_of
from tests.reference import ReferenceModel, masked
from tests.reference.cacheblend import change_of, masks, sensitivity_of
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import blend_steps, picked_positions
from workbench.tiny_models import LATENT

PREFIX = random_tokens(900, 21)
OTHER = random_tokens(899, 30)


# One on vLLM's own class, one on the Transformers backend with rotation of half the dimensions; with
# a batch size that cuts the blends into pieces on the latter. One with latents, without a prefix cache.
@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", None),
        pytest.param(("glm", 96), marks=pytest.mark.soak),
        pytest.param(("deepseek_v2", None), marks=pytest.mark.soak),
    ],
    ids=str,
)
def pair(
    request: pytest.FixtureRequest,
    engines: Engines,
    tiny_model: Callable[[str], Path],
) -> Iterator[Pair]:
    arch, batch_tokens = request.param
    folder = tiny_model(arch)
    with engines.own(folder, max_num_batched_tokens=batch_tokens) as engine:
        tokens = [random_tokens(seed, 50 + 7 * seed) for seed in range(5)]
        chunks = store_chunks(engine, tokens[:3], namespace="default", reference=OTHER)
        chunks += store_chunks(engine, tokens[3:4], namespace="default")
        chunks += store_chunks(engine, tokens[4:], namespace="default", context=PREFIX)
        reference = ReferenceModel(folder)
        stored = {chunk.id: reference.stored(chunk.context, chunk.tokens) for chunk in chunks}
        for chunk in chunks[:3]:
            stored[chunk.id] = reference.compared(chunk.context, chunk.tokens, OTHER)
        yield Pair(engine, reference, chunks, stored, arch not in LATENT)


def scattered(chunks: list[Stored]) -> tuple[Tokens, list[Span]]:
    """Chunks 2, 0, a part of 1 and 2 again, with text around them."""
    prompt, spans = random_tokens(901, 6), []
    for chunk, src, length in (
        (chunks[2], 0, 64),
        (chunks[0], 0, 50),
        (chunks[1], 11, 40),
        (chunks[2], 0, 64),
    ):
        spans.append(chunk.at(len(prompt), src=src, length=length))
        prompt = prompt + chunk.tokens[src : src + length] + random_tokens(902 + len(spans), 3)
    return prompt + random_tokens(910, 8), spans


def behind_prefix(chunks: list[Stored]) -> tuple[Tokens, list[Span]]:
    """Chunk 4 behind the prompt prefix it was stored behind (exact), then two others."""
    exact = Span(chunks[4].id, 0, len(PREFIX), len(chunks[4].tokens), base=len(PREFIX), exact=True)
    prompt, spans = PREFIX + chunks[4].tokens, [exact]
    for chunk in (chunks[3], chunks[1]):
        spans.append(chunk.at(len(prompt)))
        prompt = prompt + chunk.tokens
    return prompt + random_tokens(911, 8), spans


PROMPTS = {"scattered": scattered, "behind prefix": behind_prefix}


def ask(pair: Pair, prompt: str, **options: object) -> tuple[Completion, Tokens, ReusePlan]:
    tokens, spans = PROMPTS[prompt](pair.chunks)
    plan = plan_of(tokens, spans, ReuseOptions(**options))  # type: ignore[arg-type]
    pair.engine.reset_prefix_cache()
    answer = blended(pair.engine, tokens, **options)
    # The matcher found the spans that the test had in mind.
    assert answer.report.chunk_ids == tuple(span.chunk_id for span in plan.spans)
    assert answer.report.reused_tokens == plan.reused_tokens
    assert answer.report.exact_tokens == plan.exact_tokens
    return answer, tokens, plan


@pytest.mark.parametrize("prompt", PROMPTS)
def test_none_is_block_diagonal_attention(pair: Pair, prompt: str) -> None:
    answer, tokens, plan = ask(pair, prompt, selector="none")
    expected = masked(pair.reference, tokens, plan, pair.stored)
    assert_logprobs(answer, expected)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("check_layer", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.15, 0.5, 0.95])
def test_kv_deviation_is_cacheblend(
    pair: Pair, prompt: str, ratio: float, check_layer: int
) -> None:
    options = {"selector": "kv_deviation", "ratio": ratio, "check_layer": check_layer}
    answer, tokens, plan = ask(pair, prompt, **options)
    expected = pair.reference.blend(tokens, plan, pair.stored)
    if ratio:
        assert picked_positions(pair.engine, plan, tokens) == list(expected.picked)
    assert answer.report.recomputed_tokens == len(expected.picked)
    assert_logprobs(answer, expected.logprobs)


@pytest.mark.parametrize("ratio", [0.05, 0.3])
def test_chunk_head_picks_the_first_tokens_of_each_chunk(pair: Pair, ratio: float) -> None:
    answer, tokens, plan = ask(pair, "scattered", selector="chunk_head", ratio=ratio)
    expected = pair.reference.blend(tokens, plan, pair.stored)
    assert answer.report.recomputed_tokens == len(expected.picked) > 0
    assert_logprobs(answer, expected.logprobs)


def test_by_chance_the_same_tokens_are_picked_for_the_same_plan(pair: Pair) -> None:
    first, _, plan = ask(pair, "scattered", selector="by_chance", ratio=0.3)
    again, _, _ = ask(pair, "scattered", selector="by_chance", ratio=0.3)
    assert first.report.recomputed_tokens == round(0.3 * plan.reused_tokens)
    assert first.logprobs == again.logprobs


# What looks at the KV, each as it may be asked for. A question of 3 tokens is moved to the left; one of
# 30 reaches into the chunk before it.
LOOKING: list[dict[str, object]] = [
    {"selector": "kv_deviation", "ratio": 0.15},
    {"selector": "sensitivity_attention", "ratio": 0.15},
    {"selector": "query_attention", "ratio": 0.15},
    {"selector": "sensitivity_attention", "ratio": 0.4, "question_tokens": 30},
    {"selector": "query_attention", "ratio": 0.5, "question_tokens": 30},
    {"selector": "query_attention", "ratio": 0.05, "question_tokens": 3},
    {"selector": "deviation_x_attention", "ratio": 0.15},
    {"selector": "deviation_x_attention", "ratio": 0.3, "question_tokens": 30, "check_layer": 2},
]


def assert_as_reference(pair: Pair, answer: Completion, tokens: Tokens, plan: ReusePlan) -> None:
    expected = pair.reference.blend(tokens, plan, pair.stored)
    assert picked_positions(pair.engine, plan, tokens) == list(expected.picked)
    assert_logprobs(answer, expected.logprobs)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("options", LOOKING, ids=str)
def test_every_selector_picks_what_its_reference_picks(
    pair: Pair, prompt: str, options: dict[str, object]
) -> None:
    answer, tokens, plan = ask(pair, prompt, **options)
    assert_as_reference(pair, answer, tokens, plan)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_risk_is_of_what_the_reference_sees(pair: Pair, prompt: str) -> None:
    answer, tokens, plan = ask(pair, prompt, ratio=0.12)
    result = pair.reference.blend(tokens, plan, pair.stored)
    assert len(result.picked) <= SAMPLED, "the engine looks at all of them"
    attention = pair.reference.asked_by_layer(tokens, plan, pair.stored)
    sensitivity = sensitivity_of(plan, pair.stored)
    assert isinstance(sensitivity, torch.Tensor)
    kv = pair.reference.in_prompt(len(tokens), plan, pair.stored)
    change = change_of(result, attention, plan, kv, sensitivity)
    weighed = (attention * sensitivity)[1:].sum(0)
    columns = masks(plan, len(tokens))[1].nonzero().flatten()
    stale = ~torch.isin(columns, torch.tensor(result.picked))
    share = float(weighed[stale].sum() / weighed.sum())
    assert answer.report.risk == pytest.approx(expected_loss(share, change, len(columns)), rel=0.02)


@pytest.mark.parametrize("least", [0, 20, 96])
def test_of_a_short_prompt_the_least_tokens_are_computed(pair: Pair, least: int) -> None:
    """Up to the share of `balanced`, and the report says how much that is."""
    answer, tokens, plan = ask(pair, "scattered", ratio=0.05, least_tokens=least)
    count = {0: round(0.05 * plan.reused_tokens), 20: 20, 96: round(0.17 * plan.reused_tokens)}[
        least
    ]
    assert 96 > 0.17 * plan.reused_tokens > 20 > 0.05 * plan.reused_tokens
    assert answer.report.recomputed_tokens == count
    assert answer.report.ratio == pytest.approx(count / plan.reused_tokens, abs=0.005)
    given = replace(plan.options, ratio=count / plan.reused_tokens, least_tokens=0)
    expected = pair.reference.blend(tokens, replace(plan, options=given), pair.stored)
    assert picked_positions(pair.engine, plan, tokens) == list(expected.picked)
    assert_logprobs(answer, expected.logprobs)


def test_what_is_right_has_no_risk_and_other_selectors_tell_none(pair: Pair) -> None:
    assert ask(pair, "scattered", ratio=1.0)[0].report.risk == 0
    assert ask(pair, "scattered", selector="query_attention")[0].report.risk is None


@pytest.mark.parametrize("prompt", PROMPTS)
def test_auto_computes_until_the_risk_is_what_was_promised(pair: Pair, prompt: str) -> None:
    least, _, plan = ask(pair, prompt, ratio="auto", promise=10.0)
    assert least.report.ratio == pytest.approx(FIRST_RATIO, abs=0.02)
    assert least.report.recomputed_tokens == round(FIRST_RATIO * plan.reused_tokens)
    assert least.report.risk is not None and least.report.reason is None
    more, tokens, plan = ask(pair, prompt, ratio="auto", promise=0.6 * least.report.risk)
    assert least.report.recomputed_tokens < more.report.recomputed_tokens < plan.reused_tokens
    assert more.report.risk is not None and more.report.risk <= 0.6 * least.report.risk
    assert more.report.charged_ratio > least.report.charged_ratio
    assert more.report.reason is None
    # As though as many had been asked for.
    rows = picked_positions(pair.engine, plan, tokens)
    assert rows is not None and len(rows) == more.report.recomputed_tokens
    fixed = replace(plan, options=replace(plan.options, ratio=len(rows) / plan.reused_tokens))
    expected = pair.reference.blend(tokens, fixed, pair.stored)
    assert rows == list(expected.picked)
    assert_logprobs(more, expected.logprobs)
    # The choice is remembered where the cache holds the beginning.
    again = blended(pair.engine, tokens, ratio="auto", promise=0.6 * least.report.risk)
    assert (again.report.cached_tokens > 0) is pair.caches
    assert_logprobs(again, expected.logprobs)
    whole, tokens, plan = ask(pair, prompt, ratio="auto", promise=1e-9)
    assert whole.report.recomputed_tokens == plan.reused_tokens
    assert whole.report.risk == 0 and "computed whole" in (whole.report.reason or "")
    assert_same(whole, plain(pair.engine, tokens))


def test_auto_is_plain_where_nothing_can_be_told(pair: Pair, namespace: str) -> None:
    chunk = random_tokens(930, 60)
    store_chunks(pair.engine, [chunk], namespace=namespace)  # behind one context: no sensitivity
    tokens = random_tokens(931, 20) + chunk + random_tokens(932, 9)
    answer = blended(pair.engine, tokens, namespace=namespace, ratio="auto")
    assert answer.report.reused_tokens == answer.report.recomputed_tokens == len(chunk)
    assert "cannot be told" in (answer.report.reason or "")
    assert_same(answer, plain(pair.engine, tokens))
    promised = blended(pair.engine, tokens, namespace=namespace, ratio="auto", promise=0.0)
    assert promised.report.risk == 0
    assert_same(promised, plain(pair.engine, tokens))


@pytest.mark.parametrize("selector", [*SELECTORS, "by_chance", "deviation_x_attention"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_report_charges_what_the_selector_costs(pair: Pair, prompt: str, selector: str) -> None:
    answer, tokens, plan = ask(pair, prompt, selector=selector, ratio=0.2)
    first = next(span.dst for span in plan.spans if not span.exact)
    covered = {place for span in plan.spans for place in range(span.dst, span.end)}
    fresh = [place for place in range(plan.covered) if place not in covered]
    shape = BlendShape(
        layers=4,
        reused=plan.reused_tokens,
        exact=plan.exact_tokens,
        fresh=len(fresh),
        leading=sum(place < first for place in fresh),
        question=len(tokens) - plan.covered,
    )
    assert answer.report.charged_ratio == pytest.approx(
        charged_ratio(selector, 0.2, shape), abs=1e-4
    )


@pytest.mark.parametrize(
    "selector", [*sorted(set(SELECTORS) - {"none"}), "by_chance", "deviation_x_attention"]
)
def test_at_ratio_one_every_selector_is_plain(pair: Pair, selector: str) -> None:
    answer, tokens, _ = ask(pair, "scattered", selector=selector, ratio=1.0)
    assert_same(answer, plain(pair.engine, tokens))


@pytest.mark.parametrize("selector", [*SELECTORS, "by_chance", "deviation_x_attention"])
def test_on_exact_spans_every_selector_is_plain(pair: Pair, selector: str) -> None:
    tokens = PREFIX + pair.chunks[4].tokens + random_tokens(912, 9)
    pair.engine.reset_prefix_cache()
    answer = blended(pair.engine, tokens, selector=selector)
    assert answer.report.exact_tokens == len(pair.chunks[4].tokens)
    assert answer.report.recomputed_tokens == 0
    assert_same(answer, plain(pair.engine, tokens))


async def test_several_requests_in_one_step_pick_each_their_own(pair: Pair) -> None:
    pair.engine.reset_prefix_cache()
    asked = [
        (*PROMPTS[prompt](pair.chunks), ReuseOptions(**options))  # type: ignore[arg-type]
        for prompt in PROMPTS
        for options in LOOKING[::2]
    ]
    with blend_steps(pair.engine) as steps:
        answers = await asyncio.gather(
            *(
                pair.engine.agenerate(tokens, sampling=SAMPLING, reuse=options)
                for tokens, _, options in asked
            )
        )
    assert max(step.began for step in steps) > 1
    for answer, (tokens, spans, options) in zip(answers, asked, strict=True):
        assert_as_reference(pair, answer, tokens, plan_of(tokens, spans, options))


@pytest.mark.parametrize("options", LOOKING[::2], ids=str)
def test_a_prompt_prefix_in_the_prefix_cache_changes_no_choice(
    pair: Pair, options: dict[str, object]
) -> None:
    if not pair.caches:
        pytest.skip("there is no prefix cache")
    tokens, spans = PROMPTS["behind prefix"](pair.chunks)
    pair.engine.reset_prefix_cache()
    prefix = tokens[: len(PREFIX) + len(pair.chunks[4].tokens)]
    pair.engine.generate(prefix, sampling=SAMPLING, reuse=ReuseOptions(enabled=False))
    answer = blended(pair.engine, tokens, **options)
    assert answer.report.cached_tokens > 0
    plan = plan_of(tokens, spans, ReuseOptions(**options))  # type: ignore[arg-type]
    assert_as_reference(pair, answer, tokens, plan)


@pytest.mark.parametrize("options", LOOKING[::2], ids=str)
def test_another_question_finds_only_blocks_that_do_not_depend_on_it(
    pair: Pair, options: dict[str, object]
) -> None:
    _, tokens, plan = ask(pair, "scattered", **options)
    other = [*tokens[:-8], *random_tokens(913, 8)]
    answer = blended(pair.engine, other, **options)
    query_aware = selector_type(plan.options.selector).needs_question
    assert (answer.report.cached_tokens > 32) is (pair.caches and not query_aware)
    _, spans = PROMPTS["scattered"](pair.chunks)
    expected = pair.reference.blend(other, plan_of(other, spans, plan.options), pair.stored)
    assert_logprobs(answer, expected.logprobs)
