"""A stored context under another question: its KV is reused, and the new question is answered."""

from __future__ import annotations

from semkv_rag.engine import Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.paraphrases import OTHER, PARAPHRASE, ask, evaluate, make_pairs
from workbench.tiered import tiered

CONTEXTS = 16


def test_the_context_is_reused_and_the_new_question_answered(
    engine: Engine, namespace: str
) -> None:
    pairs = make_pairs(CONTEXTS)
    with tiered(engine, PromptCacheOptions(threshold=0.5)):
        outcomes = ask(engine, pairs, namespace)
    for outcome in outcomes:
        report = outcome.aligned.report
        assert outcome.aligned.text == outcome.full.text, outcome.pair.asked
        assert report.served_by == "semantic_text"
        assert outcome.reused >= 0.9
        assert report.recomputed_tokens <= 0.02 * report.prompt_tokens
    other = evaluate([one for one in outcomes if one.pair.kind == OTHER])
    assert other["accuracy_aligned"] >= 0.9, "the reader knows the new question"
    assert evaluate([one for one in outcomes if one.pair.kind == PARAPHRASE])["pairs"] == CONTEXTS
