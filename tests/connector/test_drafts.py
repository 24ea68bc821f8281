"""Speculative decoding beside blends: drafts change no answer.

They are made of the prompt's n-grams, by heads of random weights, by a layer that predicts one token more
(MTP), of random weights too, and by the model itself, which here drafts for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.engine.launch import engine_arguments, resolve, transfer_config
from semkv_rag.store import place_of
from workbench.answers import SAMPLING, assert_same
from workbench.chunks import Stored, Tokens, random_tokens, store_chunks
from workbench.drafters import (
    build_eagle3_head,
    build_eagle_head,
    build_medusa_heads,
    build_mtp_model,
)
from workbench.engines import Engines
from workbench.inside import inside
from workbench.settings import ENGINE_ARGS

NGRAMS = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
LONG = {**SAMPLING, "max_tokens": 24}
LONGER = {**SAMPLING, "max_tokens": 40}
PLAIN = {"enabled": False}
GUESS_RIGHT = ("ngram", "draft_model")
"""Methods whose drafts are accepted here; the others' weights are random."""
OWN_LAYERS = {"ngram": 0, "medusa": 0, "eagle": 1, "eagle3": 1, "mtp": 1, "draft_model": 6}
"""With KV of their own, which a blend does not fill."""
OPTIONS: list[dict[str, Any]] = [{"ratio": 1.0}, {"ratio": 0.15}, {"selector": "none"}, PLAIN]


@pytest.fixture(
    scope="module",
    params=[
        "ngram",
        "eagle3",
        *(
            pytest.param(method, marks=pytest.mark.soak)
            for method in ("draft_model", "eagle", "medusa", "mtp")
        ),
    ],
)
def drafts(
    request: pytest.FixtureRequest, reader: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    method = request.param
    heads = {"eagle": build_eagle_head, "eagle3": build_eagle3_head, "medusa": build_medusa_heads}
    made: dict[str, Any] = {"num_speculative_tokens": 1 if method == "mtp" else 3}
    if method == "ngram":
        made |= NGRAMS
    elif method == "draft_model":
        made["model"] = str(reader)
    elif method in heads:
        made["model"] = str(heads[method](reader, tmp_path_factory.mktemp(method)))
    return {"method": method, **made}


@pytest.fixture(scope="module")
def model(drafts: dict[str, Any], reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that is served."""
    return build_mtp_model(tmp_path_factory.mktemp("mtp")) if drafts["method"] == "mtp" else reader


@pytest.fixture(scope="module")
def plain(
    drafts: dict[str, Any], model: Path, engines: Engines, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """The same model without drafts."""
    if drafts["method"] != "mtp":
        yield request.getfixturevalue("engine")
        return
    with engines.own(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(engines: Engines, model: Path, drafts: dict[str, Any]) -> Iterator[Engine]:
    with engines.own(model, speculative_config=drafts) as engine:
        assert engine.gate.servable, engine.gate.reason
        yield engine


def stored(engine: Engine, namespace: str) -> list[Stored]:
    # With repetitions, of which drafts are made.
    chunks = [random_tokens(seed, 12) * 6 for seed in (1, 2, 3)]
    return store_chunks(engine, chunks, namespace=namespace)


def prompt_of(chunks: list[Stored], seed: int) -> Tokens:
    tokens = random_tokens(800 + seed, 9)
    return tokens + [t for chunk in chunks for t in chunk.tokens] + chunks[0].tokens[:7]


def ask(
    engine: Engine, tokens: Tokens, *, sampling: dict[str, Any] = LONG, **options: Any
) -> Completion:
    engine.reset_prefix_cache()
    return engine.generate(tokens, sampling=sampling, reuse=ReuseOptions(**options))


def forwards(engine: Engine, tokens: Tokens, **options: Any) -> tuple[int, int]:
    """How many steps with a forward an answer took, and how many of them tried drafts."""

    def count(worker: Any) -> None:
        runner = worker.model_runner
        execute, runner.forwards, runner.drafted = runner.execute_model, 0, 0

        def counting(output: Any, *args: Any, **kwargs: Any) -> Any:
            runner.forwards += output.total_num_scheduled_tokens > 0
            runner.drafted += bool(output.scheduled_spec_decode_tokens)
            return execute(output, *args, **kwargs)

        runner.execute_model = counting

    def counted(worker: Any) -> tuple[int, int]:
        runner = worker.model_runner
        del runner.execute_model
        return runner.forwards, runner.drafted

    inside(engine, count)
    ask(engine, tokens, sampling=LONGER, **options)
    return inside(engine, counted)


def test_drafts_are_accepted_behind_a_blend(
    drafting: Engine, drafts: dict[str, Any], namespace: str
) -> None:
    tokens = prompt_of(stored(drafting, namespace), 0)
    steps, drafted = forwards(drafting, tokens, namespace=namespace)
    assert drafted > 0
    if drafts["method"] in GUESS_RIGHT:
        assert steps < LONGER["max_tokens"] - 5


def test_no_draft_reads_what_another_request_left(
    drafting: Engine, drafts: dict[str, Any], namespace: str
) -> None:
    """A model that drafts has KV of its own, of which a blend has none."""

    def spoil(_: Any) -> int:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        (caches,) = get_kv_transfer_group().executor._queue._draft_kv._caches
        for cache in caches:
            cache.fill_(torch.nan)
        return len(caches)

    def sound(_: Any) -> list[int]:
        """Blocks without NaN, by layer."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        kept = get_kv_transfer_group().executor._queue._draft_kv
        (caches,) = kept._caches
        axes = [kept._paged._block_axis(cache)[0] for cache in caches]
        numbers = zip(caches, axes, strict=True)
        return [int(c.movedim(a, 0).flatten(1).isfinite().all(1).sum()) for c, a in numbers]

    tokens = prompt_of(stored(drafting, namespace), 3)
    drafting.reset_prefix_cache()
    assert inside(drafting, spoil) == OWN_LAYERS[drafts["method"]]
    answer = ask(drafting, tokens, namespace=namespace, selector="none")
    assert answer.report.recomputed_tokens == 0
    assert answer.report.reused_tokens == 216
    for blocks in inside(drafting, sound):
        assert blocks >= len(tokens) // ENGINE_ARGS["block_size"]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_answers_are_those_without_drafts(
    drafting: Engine, plain: Engine, namespace: str, options: dict[str, Any]
) -> None:
    answers = []
    for one in (drafting, plain):
        tokens = prompt_of(stored(one, namespace), 1)
        answers.append(ask(one, tokens, namespace=namespace, **options))
    assert answers[0].report.reused_tokens == (0 if options is PLAIN else 216)
    assert answers[0].report.recomputed_tokens == answers[1].report.recomputed_tokens
    assert_same(*answers)


def test_at_ratio_one_it_is_plain_with_drafts(drafting: Engine, namespace: str) -> None:
    tokens = prompt_of(stored(drafting, namespace)[::-1], 2)
    answer = ask(drafting, tokens, namespace=namespace, ratio=1.0)
    assert answer.report.recomputed_tokens == 216
    assert_same(answer, ask(drafting, tokens, enabled=False))


async def test_several_at_once(drafting: Engine, namespace: str) -> None:
    chunks = stored(drafting, namespace)
    asked = [(prompt_of(chunks, seed), OPTIONS[seed % 4]) for seed in range(10, 18)]
    alone = []
    for tokens, options in asked:
        drafting.reset_prefix_cache()
        reuse = ReuseOptions(namespace=namespace, **options)
        alone.append(await drafting.agenerate(tokens, sampling=LONG, reuse=reuse))
    drafting.reset_prefix_cache()
    together = await asyncio.gather(
        *(
            drafting.agenerate(
                tokens, sampling=LONG, reuse=ReuseOptions(namespace=namespace, **options)
            )
            for tokens, options in asked
        )
    )
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


def test_a_conversation_finds_its_blended_blocks(
    drafting: Engine, drafts: dict[str, Any], namespace: str
) -> None:
    """Blocks that were filled while drafts were tried and refused."""
    chunks = store_chunks(
        drafting, [random_tokens(seed, 90) for seed in (1, 2)], namespace=namespace
    )
    tokens = random_tokens(804, 70) + [token for chunk in chunks for token in chunk.tokens]
    tokens += random_tokens(806, 12)
    first = ask(drafting, tokens, sampling=LONGER, namespace=namespace)
    later = [*tokens, *first.token_ids, *random_tokens(805, 40)]
    reuse = ReuseOptions(namespace=namespace)
    second = drafting.generate(later, sampling=LONG, reuse=reuse)
    # vLLM computes the last block again that it finds, for the head to see what comes of it.
    again = ENGINE_ARGS["block_size"] if drafts["method"] in ("eagle", "eagle3", "mtp") else 0
    assert second.report.cached_tokens > len(tokens) - again
    assert_same(second, ask(drafting, later, namespace=namespace))


def test_other_drafts_are_refused_by_name(reader: Path, tmp_path: Path) -> None:
    transfer = transfer_config(
        place_of(tmp_path), index_url=None, reuse=ReuseOptions(), request_namespace=True
    )
    drafts = {**NGRAMS, "method": "ngram_gpu", "num_speculative_tokens": 2}
    arguments = {**ENGINE_ARGS, "speculative_config": drafts}
    _, obstacle = resolve(engine_arguments(str(reader), arguments), transfer)
    assert obstacle == "speculative decoding is on with ngram_gpu"
