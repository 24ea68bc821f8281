"""Log-probabilities along a given answer are those that a request would have met on its way there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from workbench.answers import SAMPLING
from workbench.chunks import random_tokens, store_chunks

TOLERANCE = 1e-4
QUESTION = random_tokens(811, 12)


def far(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """The largest difference of the log-probabilities of tokens that both tell of."""
    common = one.keys() & other.keys()
    assert common
    return max(abs(one[token] - other[token]) for token in common)


@pytest.mark.parametrize(
    "options",
    [
        {"enabled": False},
        {"selector": "none"},
        {"selector": "kv_deviation", "ratio": 0.2},
        {"selector": "query_attention", "ratio": 0.2},
        {"selector": "sensitivity_attention", "ratio": 0.2},
        {"ratio": 1.0},
    ],
    ids=str,
)
def test_along_any_answer(
    engine: Engine, namespace: str, options: dict[str, float | str | bool]
) -> None:
    chunks = [random_tokens(seed, 40) for seed in (801, 802, 803)]
    store_chunks(engine, chunks, namespace=namespace)
    prompt = [*chunks[2], *chunks[0], *chunks[1], *QUESTION]
    reuse = ReuseOptions.from_mapping({**options, "namespace": namespace})
    engine.reset_prefix_cache()
    # With the chunk at its end, the answer holds what could be taken for reusable.
    answer = [*random_tokens(804, 3), *chunks[0]]
    scored = engine.score(prompt, answer, top=5, reuse=reuse)
    assert len(scored) == len(answer)
    asked = {**SAMPLING, "max_tokens": 8}
    own = engine.generate(prompt, sampling=asked, reuse=reuse)
    assert own.logprobs is not None
    assert own.report.kv_cache == ("hit" if reuse.enabled else "skip")
    assert scored[0] is not None and far(scored[0], own.logprobs[0]) <= TOLERANCE
    for place in (0, 1, 2, len(answer) - 1):
        assert answer[place] in (scored[place] or {})
    along_own = engine.score(prompt, own.token_ids, top=5, reuse=reuse)
    known = [place for place, at in enumerate(along_own) if at is not None]
    assert known and known[-1] == len(own.token_ids) - 1
    for place in known:
        at = along_own[place]
        assert at is not None and far(at, own.logprobs[place]) <= TOLERANCE


def test_the_blend_changes_what_is_said(engine: Engine, namespace: str) -> None:
    """Else the test above would be met by an engine that never blends a scored prompt."""
    chunks = [random_tokens(seed, 40) for seed in (805, 806)]
    store_chunks(engine, chunks, namespace=namespace)
    prompt, answer = [*chunks[1], *chunks[0], *QUESTION], random_tokens(807, 4)
    ways = [
        engine.score(prompt, answer, reuse=ReuseOptions(namespace=namespace, **way))
        for way in ({"enabled": False}, {"selector": "none"}, {"ratio": 1.0})
    ]
    (plain, stored, exact) = [[at for at in way if at is not None] for way in ways]
    assert max(far(one, other) for one, other in zip(plain, exact, strict=False)) <= TOLERANCE
    assert max(far(one, other) for one, other in zip(plain, stored, strict=False)) > 0.01


def test_plainly_it_is_what_vllm_says_behind_the_same_tokens(engine: Engine) -> None:
    prompt, answer = random_tokens(808, 50), random_tokens(809, 5)
    off = ReuseOptions(enabled=False)
    engine.reset_prefix_cache()
    scored = engine.score(prompt, answer, top=5, reuse=off)
    for place, at in enumerate(scored):
        behind = engine.generate([*prompt, *answer[:place]], sampling=SAMPLING, reuse=off)
        assert behind.logprobs is not None and at is not None
        assert far(at, behind.logprobs[0]) <= TOLERANCE


def test_messages_and_text_as_tokens(engine: Engine) -> None:
    text = "Question : who leads Tre klim ? Answer :"
    tokens = engine.tokenizer(text).input_ids
    assert engine.tokens_of(text) == tokens
    assert engine.tokens_of([{"role": "user", "content": text}]) == tokens
