"""Variants of chunks in vLLM: computed behind a neighbour, taken where that neighbour stands."""

from __future__ import annotations

from collections.abc import Sequence

from semkv_rag.corpus import ContextMode, head_tokens, precompute_texts
from semkv_rag.engine import Engine
from semkv_rag.reuse import token_array
from semkv_rag.store import chunk_id
from workbench.answers import assert_same, blended, plain
from workbench.chunks import Tokens, random_tokens

HEAD = random_tokens(800, 40)
A, B, C = (random_tokens(seed, 70) for seed in (801, 802, 803))
QUESTION = random_tokens(804, 10)


def store(
    engine: Engine,
    namespace: str,
    chunks: Sequence[Tokens],
    context: Sequence[ContextMode],
    head: Sequence[int] = (),
) -> None:
    decode = engine.tokenizer.decode
    texts = [decode(tokens) for tokens in chunks]
    assert [engine.tokenizer.encode(text) for text in texts] == [*chunks]
    result = precompute_texts(
        engine, [("document", texts)], namespace=namespace, head=decode(head), context=context
    )
    assert result.failures == []


def variant(engine: Engine, namespace: str, context: Tokens, tokens: Tokens) -> str:
    return chunk_id(engine.fingerprint, namespace, token_array(context), token_array(tokens))


def test_neighbours_behind_the_head_are_exact(engine: Engine, namespace: str) -> None:
    store(engine, namespace, [A, B, C], ["head", "left"], HEAD)
    prompt = HEAD + A + B + QUESTION
    answer = blended(engine, prompt, namespace=namespace)
    assert answer.report.exact_tokens == len(HEAD + A + B)
    assert answer.report.reused_tokens == answer.report.recomputed_tokens == 0
    assert_same(answer, plain(engine, prompt))


def test_the_variant_is_taken_whose_neighbour_stands_there(engine: Engine, namespace: str) -> None:
    store(engine, namespace, [A, B, C], ["head", "left"], HEAD)
    behind_head = variant(engine, namespace, HEAD, C)
    behind_left = variant(engine, namespace, HEAD + B, C)
    between = QUESTION[:3]
    for before, taken in (
        (A, behind_head),
        (B, behind_left),
        (B + between, behind_left),
        (A + between, behind_head),
    ):
        report = blended(engine, QUESTION + before + C + QUESTION, namespace=namespace).report
        assert {behind_head, behind_left} & set(report.chunk_ids) == {taken}
        assert report.reused_tokens == len(before + C) - (len(before) > len(A)) * len(between)


def test_a_neighbour_that_is_too_long_is_cut(engine: Engine, namespace: str) -> None:
    long, short = random_tokens(805, 900), random_tokens(806, 200)
    store(engine, namespace, [long, short], ["left"], HEAD)
    room = engine.max_model_len - 1 - len(HEAD + short)
    assert engine.store is not None
    ids = {record.id for record in engine.store.chunks(engine.fingerprint, namespace)}
    assert variant(engine, namespace, HEAD + long[-room:], short) in ids
    assert len(ids) == 3


def test_a_chunk_at_the_prompts_start_is_found_all_the_same(engine: Engine, namespace: str) -> None:
    store(engine, namespace, [A], ["head"])
    neutral = head_tokens(engine.tokenizer).tolist()
    assert len(neutral) == 1, "the reader puts nothing before a prompt"
    prompt = A + QUESTION
    answer = blended(engine, prompt, namespace=namespace, ratio=1)
    assert answer.report.chunk_ids == (variant(engine, namespace, neutral, A),)
    assert (answer.report.exact_tokens, answer.report.reused_tokens) == (0, len(A))
    assert_same(answer, plain(engine, prompt))
