"""Chunks that stand behind the very context they were computed behind are reused as they are."""

from __future__ import annotations

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.answers import assert_same, blended, plain
from workbench.chunks import random_tokens, store_chunks

PREFIX = random_tokens(700, 45)
QUESTION = random_tokens(701, 10)


def test_a_chunk_behind_its_prompt_prefix_is_exact(engine: Engine, namespace: str) -> None:
    chunk = store_chunks(engine, [random_tokens(1, 150)], namespace=namespace, context=PREFIX)[0]
    prompt = PREFIX + chunk.tokens + QUESTION
    answer = blended(engine, prompt, namespace=namespace, selector="none")
    assert answer.report.exact_tokens == 150
    assert answer.report.reused_tokens == answer.report.recomputed_tokens == 0
    assert_same(answer, plain(engine, prompt))


def test_a_chain_of_chunks_each_behind_the_ones_before(engine: Engine, namespace: str) -> None:
    prompt = list(PREFIX)
    for seed in (1, 2, 3):
        tokens = random_tokens(seed, 60)
        store_chunks(engine, [tokens], namespace=namespace, context=prompt)
        prompt = prompt + tokens
    answer = blended(engine, prompt + QUESTION, namespace=namespace)
    assert answer.report.exact_tokens == 180
    assert answer.report.recomputed_tokens == 0
    assert_same(answer, plain(engine, prompt + QUESTION))


def test_the_same_chunk_behind_another_prompt_prefix_is_not_exact(
    engine: Engine, namespace: str
) -> None:
    chunk = store_chunks(engine, [random_tokens(1, 150)], namespace=namespace, context=PREFIX)[0]
    other = [*PREFIX[:-1], PREFIX[-1] + 1]
    answer = blended(engine, other + chunk.tokens + QUESTION, namespace=namespace)
    assert answer.report.exact_tokens == 0
    assert answer.report.reused_tokens == 150


def test_a_prompt_that_ends_with_the_chunk_leaves_its_last_token(
    engine: Engine, namespace: str
) -> None:
    chunk = store_chunks(engine, [random_tokens(1, 150)], namespace=namespace)[0]
    answer = blended(engine, chunk.tokens, namespace=namespace)
    assert answer.report.exact_tokens == 149
    assert_same(answer, plain(engine, chunk.tokens))


def test_an_answer_of_one_token_has_its_figures(engine: Engine, namespace: str) -> None:
    """The workers' results come just in time for a request that ends in the step of its blend."""
    chunk = store_chunks(engine, [random_tokens(1, 150)], namespace=namespace)[0]
    report = engine.generate(
        PREFIX + chunk.tokens + QUESTION,
        sampling={"max_tokens": 1},
        reuse=ReuseOptions(namespace=namespace, ratio=0.2),
    ).report
    assert report.recomputed_tokens == 30
    assert report.blend_ms > report.load_ms > 0
