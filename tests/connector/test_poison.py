"""Whatever numbers stand in a chunk file, no request is answered wrongly by what another one left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from workbench.answers import SAMPLING, assert_same, counted, plain
from workbench.chunks import Tokens, random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside
from workbench.poison import VALUES, poison

QUESTION = random_tokens(851, 9)
LATER = [random_tokens(860 + n, 5 + 23 * n) for n in range(6)]
"""Prompts of several lengths: most of them leave slots of their last block as they were."""


@pytest.fixture(scope="module", params=["reader", "gemma3_sliding"])
def small(
    request: pytest.FixtureRequest,
    engines: Engines,
    reader: Path,
    tiny_model: Callable[[str], Path],
) -> Iterator[Engine]:
    """An engine whose cache is so small that blocks are used again at once.

    Of the one with windows, blends give most of theirs back when they end.
    """
    model = reader if request.param == "reader" else tiny_model(request.param)
    arguments = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 512}
    with engines.own(model, **arguments) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(small: Engine) -> list[Completion]:
    return [plain(small, prompt) for prompt in LATER]


def later(engine: Engine) -> list[Completion]:
    """What requests without reuse are answered next, side by side."""
    options = {**SAMPLING, "skip_reading_prefix_cache": True}
    return engine.generate_many(LATER, sampling=options, reuse=ReuseOptions(enabled=False))


def nothing_left(engine: Engine) -> bool:
    """Whether the whole paged cache is numbers."""

    def look(worker: object) -> bool:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        layers = get_kv_transfer_group().executor._blend_pass.setting.model.layers
        return all(bool(layer.attention.kv_cache.isfinite().all()) for layer in layers)

    return inside(engine, look)


@pytest.mark.parametrize(
    "place",
    [
        "first layer K",
        "last layer V",
        *(pytest.param(place, marks=pytest.mark.soak) for place in ("first layer V", "a middle K")),
    ],
)
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_no_model_computes(
    small: Engine, expected: list[Completion], namespace: str, kind: str, place: str
) -> None:
    layer = {"first": 0, "a": 2, "last": -1}[place.split()[0]]
    part = int(place.endswith("V"))
    chunk, other = store_chunks(
        small, [random_tokens(seed, 90) for seed in (852, 853)], namespace=namespace
    )
    assert small.store is not None
    path = small.store.path(small.fingerprint, namespace, chunk.id)
    poison(path, VALUES[kind], layer, part, slice(40, 44))
    for prompt in (
        other.tokens + chunk.tokens + QUESTION,
        chunk.tokens + other.tokens + QUESTION,
    ):
        for ratio in (0.0, 0.2):
            answer = ask(small, prompt, namespace, ratio)
            if answer.report.kv_cache != "hit":
                assert_same(answer, plain(small, prompt))
            assert nothing_left(small)
    for answer, right in zip(later(small), expected, strict=True):
        assert_same(answer, right)
    if kind in ("NaN", "infinity", "minus infinity"):
        assert not small.store.verify().ok
        small.store.verify(repair=True)


def ask(engine: Engine, prompt: Tokens, namespace: str, ratio: float) -> Completion:
    options = ReuseOptions(ratio=ratio, namespace=namespace)
    return engine.generate(prompt, sampling=SAMPLING, reuse=options)


def test_what_is_refused_is_told(small: Engine, namespace: str) -> None:
    for kind, words, fault in (
        ("NaN", "NaN or infinity", "chunk"),
        ("huge", "no numbers", "not_finite"),
    ):
        before = counted(small, "semkv_faults_total", fault)
        (chunk,) = store_chunks(small, [random_tokens(855, 90)], namespace=namespace + kind)
        assert small.store is not None
        path = small.store.path(small.fingerprint, namespace + kind, chunk.id)
        poison(path, VALUES[kind], 2, 0, slice(40, 44))
        prompt = random_tokens(856, 7) + chunk.tokens + QUESTION
        answer = ask(small, prompt, namespace + kind, 0.1)
        assert answer.report.kv_cache == "miss"
        assert answer.report.reason is not None and words in answer.report.reason
        assert counted(small, "semkv_faults_total", fault) == before + 1
        assert_same(answer, plain(small, prompt))
        # And it is not tried again.
        assert ask(small, prompt, namespace + kind, 0.1).report.chunk_ids == ()
