"""The family in vLLM, with a store and blends: it answers as the evaluation in plain PyTorch says."""

from __future__ import annotations

import random

import pytest

from semkv_rag.config import ReuseOptions
from workbench.chunks import store_chunks
from workbench.engines import Engines
from workbench.quality import grammar, rules, words
from workbench.quality.batches import collate
from workbench.quality.export import MODELS, load
from workbench.quality.reuse import Blend, blend, prefill, right, whole

FOLDER = MODELS / "layer1-0"
GREEDY = {"temperature": 0.0, "max_tokens": 4}


def chunks_of(context: grammar.Context) -> list[list[int]]:
    chunks: list[list[int]] = [[] for _ in range(context.chunks[-1] + 1)]
    for token, chunk in zip(context.tokens, context.chunks, strict=True):
        chunks[chunk].append(token)
    return chunks


@pytest.mark.soak
def test_answers_with_full_prefill_reuse_and_a_blend_are_those_of_the_evaluation(
    engines: Engines,
) -> None:
    draw = random.Random(77)
    rows = []
    for _ in range(6):
        context = grammar.make_context(draw, held=True)
        rows.append((context, draw.sample(context.facts, 6)))
    batch = collate(rows)
    model = load(FOLDER)
    full, _ = prefill(model, batch, whole(batch))
    _, stored = prefill(model, batch, batch.chunks)
    reused, _ = blend(model, batch, stored, Blend(0.0, rules.by_chance(1)))
    checked, _ = blend(model, batch, stored, Blend(0.0, rules.by_deviation, check=3))
    ways = {
        "full": (ReuseOptions(enabled=False), full),
        "reused": (ReuseOptions(selector="none"), reused),
        "checked": (ReuseOptions(selector="kv_deviation", check_layer=3, ratio=0.0), checked),
    }
    # There must be something to tell apart.
    assert sum(right(model, batch, full)) > sum(right(model, batch, reused)) + 5
    with engines.own(FOLDER) as engine:
        for context, _ in rows:
            store_chunks(engine, chunks_of(context), namespace="default")
        prompts = [
            [*rows[a.row][0].tokens, words.ASK, a.fact.name, words.QUESTION] for a in batch.asked
        ]
        for name, (reuse, last) in ways.items():
            expected = right(model, batch, last)
            answers = engine.generate_many(prompts, sampling=GREEDY, reuse=reuse)
            found = [
                tuple(answer.token_ids)[: len(asked.fact.answer)] == asked.fact.answer
                for answer, asked in zip(answers, batch.asked, strict=True)
            ]
            assert found == expected, name
