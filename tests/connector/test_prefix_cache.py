"""vLLM's prefix cache stays on and stays exact, whatever was blended before."""

from __future__ import annotations

from typing import Any

from semkv_rag.blend import selector_type
from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.inside import inside
from workbench.settings import ENGINE_ARGS

PREFIX = random_tokens(800, 70)
QUESTION = random_tokens(801, 12)


def ordinary(engine: Engine, prompt: Tokens) -> Completion:
    """A request without reuse that may read the prefix cache."""
    return engine.generate(prompt, sampling=SAMPLING, reuse=ReuseOptions(enabled=False))


def three_chunks(engine: Engine, namespace: str) -> list[Stored]:
    return store_chunks(engine, [random_tokens(s, 90) for s in (1, 2, 3)], namespace=namespace)


def prompt_of(chunks: list[Stored]) -> Tokens:
    return PREFIX + [token for chunk in chunks for token in chunk.tokens] + QUESTION


def test_ordinary_requests_after_any_mix_of_blends(engine: Engine) -> None:
    # The default namespace: only there could blends and ordinary requests share blocks at all.
    chunks = three_chunks(engine, "default")
    prompts = [prompt_of(chunks), prompt_of(chunks[::-1])]
    expected = [plain(engine, prompt) for prompt in prompts]
    engine.reset_prefix_cache()
    for prompt in prompts:
        for options in (
            {"ratio": 0.15},
            {"selector": "none"},
            {"ratio": 0.5, "check_layer": 2},
            {"selector": "by_chance", "ratio": 0.4},
            {"selector": "none", "ratio": 1.0},
        ):
            blended(engine, prompt, **options)
    answers = [ordinary(engine, prompt) for prompt in prompts]
    for answer, right in zip(answers, expected, strict=True):
        # The prompt prefix is exact, so its blocks are shared with the blends; nothing behind it is.
        assert 0 < answer.report.cached_tokens <= len(PREFIX)
        assert_same(answer, right)


def test_a_blend_never_sees_blocks_of_another_plan(engine: Engine, namespace: str) -> None:
    prompt = prompt_of(three_chunks(engine, namespace))
    plans = [
        {"ratio": 0.1, "namespace": namespace},
        {"ratio": 0.4, "namespace": namespace},
        {"selector": "none", "namespace": namespace},
        {"selector": "kv_deviation", "ratio": 0.1, "check_layer": 3, "namespace": namespace},
    ]
    alone = []
    for plan in plans:
        engine.reset_prefix_cache()
        alone.append(blended(engine, prompt, **plan))
    engine.reset_prefix_cache()
    together = [blended(engine, prompt, **plan) for plan in plans]
    assert len({answer.logprobs[0].__repr__() for answer in alone if answer.logprobs}) == len(plans)
    for one, other in zip(alone, together, strict=True):
        assert other.report.cached_tokens <= len(PREFIX)
        assert_same(one, other)


def test_the_same_plan_again_is_a_prefix_hit(engine: Engine, namespace: str) -> None:
    prompt = prompt_of(three_chunks(engine, namespace))
    first = blended(engine, prompt, namespace=namespace)
    again = blended(engine, prompt, namespace=namespace)
    assert again.report.cached_tokens > len(PREFIX) + 200
    assert_same(first, again)


def test_a_conversation_goes_on_with_its_blended_blocks(engine: Engine, namespace: str) -> None:
    """Its later prompts ask something else, of KV that was blended for the first question."""
    prompt = prompt_of(three_chunks(engine, namespace))
    first = blended(engine, prompt, namespace=namespace)
    later = [*prompt, *first.token_ids, *random_tokens(805, 40)]
    second = blended(engine, later, namespace=namespace)
    assert selector_type(second.report.selector).needs_question
    assert second.report.cached_tokens > len(prompt) - 2 * ENGINE_ARGS["block_size"]
    engine.reset_prefix_cache()
    assert_same(second, blended(engine, later, namespace=namespace))


def test_a_plan_half_in_the_prefix_cache_picks_the_same_tokens(
    engine: Engine, namespace: str
) -> None:
    """The first blocks come from the cache; the others must be what they were the first time."""
    chunks = three_chunks(engine, namespace)
    prompt = prompt_of(chunks)
    options = {"namespace": namespace, "selector": "kv_deviation"}
    first = blended(engine, prompt, **options)
    # Another end, the same plan up to the question: all its blocks but the last are in the cache.
    other = blended(engine, [*prompt[:-12], *random_tokens(802, 12)], **options)
    assert other.report.cached_tokens > len(PREFIX)
    engine.reset_prefix_cache()
    alone = blended(engine, [*prompt[:-12], *random_tokens(802, 12)], **options)
    assert_same(other, alone)
    assert first.report.reused_tokens == other.report.reused_tokens


def test_the_same_chunks_behind_other_text_are_picked_anew(engine: Engine, namespace: str) -> None:
    """What was picked belongs to the prompt, not only to where its chunks stand."""
    chunks = three_chunks(engine, namespace)
    one = prompt_of(chunks)
    other = random_tokens(804, len(PREFIX)) + one[len(PREFIX) :]
    options = {"ratio": 0.1, "namespace": namespace}
    alone = blended(engine, other, **options)

    def forget(worker: Any) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        get_kv_transfer_group().executor._blend_pass.picked.clear()

    inside(engine, forget)
    engine.reset_prefix_cache()
    blended(engine, one, **options)
    assert_same(blended(engine, other, **options), alone)


def test_namespaces_share_no_blocks(engine: Engine, namespace: str) -> None:
    """How fast an answer comes must not tell what another tenant has asked."""
    prompt = random_tokens(803, 200)
    ordinary(engine, prompt)
    assert ordinary(engine, prompt).report.cached_tokens > 100
    options = ReuseOptions(enabled=False, namespace=namespace)
    answer = engine.generate(prompt, sampling=SAMPLING, reuse=options)
    assert answer.report.cached_tokens == 0
    assert engine.generate(prompt, sampling=SAMPLING, reuse=options).report.cached_tokens > 100
