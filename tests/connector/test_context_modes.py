"""Variants of chunks in vLLM: computed behind their document, taken where that stands before them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from semkv_rag.blend import decoded
from semkv_rag.corpus import ContextMode, precompute_texts, prefix_tokens
from semkv_rag.engine import Engine
from semkv_rag.reuse import token_array
from semkv_rag.store import ChunkFile, chunk_id
from workbench.answers import assert_same, blended, plain
from workbench.chunks import Tokens, random_tokens, store_chunks

PREFIX = random_tokens(800, 40)
A, B, C = (random_tokens(seed, 70) for seed in (801, 802, 803))
QUESTION = random_tokens(804, 10)


def store(
    engine: Engine,
    namespace: str,
    chunks: Sequence[Tokens],
    context: Sequence[ContextMode],
    prefix: Sequence[int] = (),
) -> None:
    decode = engine.tokenizer.decode
    texts = [decode(tokens) for tokens in chunks]
    assert [engine.tokenizer.encode(text) for text in texts] == [*chunks]
    result = precompute_texts(
        engine, [("document", texts)], namespace=namespace, prefix=decode(prefix), context=context
    )
    assert result.failures == []


def variant(engine: Engine, namespace: str, context: Tokens, tokens: Tokens) -> str:
    return chunk_id(engine.fingerprint, namespace, token_array(context), token_array(tokens))


def test_a_document_behind_the_prompt_prefix_is_exact(engine: Engine, namespace: str) -> None:
    store(engine, namespace, [A, B, C], ["prefix", "left"], PREFIX)
    prompt = PREFIX + A + B + C + QUESTION
    answer = blended(engine, prompt, namespace=namespace)
    assert answer.report.exact_tokens == len(PREFIX + A + B + C)
    assert answer.report.reused_tokens == answer.report.recomputed_tokens == 0
    assert_same(answer, plain(engine, prompt))


@pytest.mark.parametrize("modes", [["prefix", "left"], ["left"]], ids=str)
def test_what_changes_with_the_context_is_stored(
    engine: Engine, namespace: str, modes: list[ContextMode]
) -> None:
    store(engine, namespace, [A, B], modes, PREFIX)
    assert engine.store is not None

    def open_variant(context: Tokens, tokens: Tokens) -> ChunkFile:
        id_ = variant(engine, namespace, context, tokens)
        assert engine.store is not None
        path = engine.store.path(engine.fingerprint, namespace, id_)
        return ChunkFile(path, model=engine.fingerprint, chunk_id=id_)

    if "prefix" in modes:
        with open_variant(PREFIX, B) as behind_prefix:
            assert behind_prefix.sensitivity() is None
    else:
        (one,) = store_chunks(engine, [B], namespace=namespace, context=PREFIX)
        assert one.id == variant(engine, namespace, PREFIX, B)
    with open_variant(PREFIX, B) as alone, open_variant(PREFIX + A, B) as behind:
        layers = range(behind.header.layers)
        pairs = [(behind.layer(layer)[1], alone.layer(layer)[1]) for layer in layers]
        expected = torch.stack([(a.float() - b.float()).norm(dim=(1, 2)) for a, b in pairs])
        codes = behind.sensitivity()
    assert codes is not None
    assert expected[0].max() < 1e-5 < expected[1].min(), "the first layer sees no context"
    torch.testing.assert_close(decoded(codes[1:]), expected[1:], rtol=0.05, atol=0)


def test_the_variant_is_taken_whose_context_stands_there(engine: Engine, namespace: str) -> None:
    store(engine, namespace, [A, B, C], ["prefix", "left"], PREFIX)
    behind_prefix = variant(engine, namespace, PREFIX, C)
    behind_left = variant(engine, namespace, PREFIX + A + B, C)
    between = QUESTION[:3]
    for before, taken in (
        (PREFIX, behind_prefix),
        (B, behind_left),
        (B + between, behind_left),
        (A + between, behind_left),  # it has seen a text, if not this one
    ):
        report = blended(engine, QUESTION + before + C + QUESTION, namespace=namespace).report
        assert {behind_prefix, behind_left} & set(report.chunk_ids) == {taken}
        assert report.reused_tokens == len(before + C) - (len(before) > len(A)) * len(between)


def test_a_text_that_is_too_long_is_cut(engine: Engine, namespace: str) -> None:
    long, short = random_tokens(805, 900), random_tokens(806, 200)
    store(engine, namespace, [long, short], ["left"], PREFIX)
    room = engine.max_model_len - 1 - len(PREFIX + short)
    assert engine.store is not None
    ids = {record.id for record in engine.store.chunks(engine.fingerprint, namespace)}
    assert variant(engine, namespace, PREFIX + long[-room:], short) in ids
    assert len(ids) == 3


def test_a_chunk_at_the_prompts_start_is_found_all_the_same(engine: Engine, namespace: str) -> None:
    store(engine, namespace, [A], ["prefix"])
    neutral = prefix_tokens(engine.tokenizer).tolist()
    assert len(neutral) == 1, "the reader puts nothing before a prompt"
    prompt = A + QUESTION
    answer = blended(engine, prompt, namespace=namespace, ratio=1)
    assert answer.report.chunk_ids == (variant(engine, namespace, neutral, A),)
    assert (answer.report.exact_tokens, answer.report.reused_tokens) == (0, len(A))
    assert_same(answer, plain(engine, prompt))
