"""Images in a model with M-RoPE: they stand on a grid, and all behind them at positions of their own.

An image of 56 pixels is 2 x 2 tokens here, so that what stands behind it is moved by 2 and not by 4.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Engine
from semkv_rag.prompt_cache import PromptCacheOptions
from workbench.answers import SAMPLING, assert_same, largest_difference
from workbench.chunks import store_chunks
from workbench.engines import Engines
from workbench.inside import inside
from workbench.tiny_models import IMAGE_PROMPTS, QWEN_VL
from workbench.vision import about as prompt_about
from workbench.vision import (
    ask,
    count_tower,
    forget_features,
    of_qwen,
    picture,
    plain,
    settle,
    tower_runs,
)

FACTS = "a question about the colour of the car is answered from documents that were found " * 3
NOTES = "who owns this harbour and where does that river end every answer is short " * 3
QUESTION = " what is the colour of this car"
BEFORE = "here is one : " + FACTS + "{}" + QUESTION
BETWEEN = "here is one : " + FACTS + "{} and another : " + NOTES + "{}" + QUESTION
BEHIND = "here it is : {}" + FACTS + QUESTION


@pytest.fixture(
    scope="module",
    params=["paddleocr_vl", *(pytest.param(arch, marks=of_qwen) for arch in QWEN_VL)],
)
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(request.param)


Asked: TypeAlias = Callable[..., dict[str, Any]]
"""A prompt whose `{}` are these pictures."""


@pytest.fixture(scope="module")
def about(model: Path) -> Asked:
    return partial(prompt_about, mark=IMAGE_PROMPTS[model.name])


def start(engines: Engines, model: Path, **options: Any) -> Engine:
    engine = engines.own(model, prompt_cache=PromptCacheOptions(), encoders={}, **options)
    count_tower(engine)
    return engine


@pytest.fixture(scope="module")
def engine(engines: Engines, model: Path) -> Iterator[Engine]:
    with start(engines, model) as engine:
        assert engine.gate.servable, engine.gate.reason
        yield engine


@pytest.fixture
def stored(engine: Engine, namespace: str) -> dict[str, int]:
    """Tokens of the texts that the store has."""
    texts = {text: engine.tokenizer(text).input_ids for text in (FACTS, NOTES)}
    store_chunks(engine, list(texts.values()), namespace=namespace)
    return {text: len(tokens) for text, tokens in texts.items()}


def forget(engine: Engine) -> None:
    settle(engine)
    assert engine.reset_prefix_cache()
    forget_features(engine)


def test_the_model_looks_at_its_images(engine: Engine, about: Asked) -> None:
    """Else the tests below could not fail."""
    one, other = (plain(engine, about(BEFORE, picture(seed))) for seed in (1, 2))
    assert one.token_ids != other.token_ids or largest_difference(one, other) > 0.1


def test_what_stands_behind_an_image_is_moved_by_its_edge(engine: Engine, about: Asked) -> None:
    """So the number of a token behind it is not its position."""

    def watch(worker: Any) -> None:
        runner, begin = worker.model_runner, worker.model_runner._init_mrope_positions

        def began(request: Any) -> None:
            begin(request)
            worker.moved_by = int(request.mrope_position_delta)

        runner._init_mrope_positions = began

    inside(engine, watch)
    plain(engine, about(BEHIND, picture(1)))
    assert inside(engine, lambda worker: worker.moved_by) == 2 - 4


@pytest.mark.parametrize("text", [BEFORE, BETWEEN], ids=["one image", "two images"])
def test_chunks_before_and_behind_images_are_reused(
    engine: Engine, namespace: str, stored: dict[str, int], text: str, about: Asked
) -> None:
    there = sum(tokens for chunk, tokens in stored.items() if chunk in text)
    asked = about(text, *map(picture, range(3, 3 + text.count("{}"))))
    reference = plain(engine, asked)
    for options in ({"ratio": 1.0}, {"selector": "none"}):
        forget(engine)
        answer = ask(engine, asked, namespace=namespace, **options)
        report = answer.report
        assert 0.8 * there < report.reused_tokens <= there, report
        if report.recomputed_tokens:
            assert report.recomputed_tokens == report.reused_tokens
            assert_same(answer, reference)
        else:
            assert largest_difference(answer, reference) > 1e-3


def test_features_that_a_blend_computed_are_stored_and_loaded(
    engine: Engine, namespace: str, stored: dict[str, int], about: Asked
) -> None:
    asked = about(BEHIND, picture(5))
    expected = plain(engine, asked)
    for seen, computed, loaded in (("miss", 1, 0), ("hit", 0, 1), ("hit", 0, 1)):
        forget(engine)
        before = tower_runs(engine)
        answer = ask(engine, asked, namespace=namespace, ratio=1.0)
        report = answer.report
        assert 0.8 * stored[FACTS] < report.reused_tokens <= stored[FACTS], report
        assert tower_runs(engine) - before == computed
        assert (report.images_computed, report.images_loaded) == (computed, loaded)
        assert report.tiers["fusion"] == seen
        assert_same(answer, expected)


def test_an_image_whose_features_cannot_be_read_is_computed(
    engine: Engine, namespace: str, stored: dict[str, int], about: Asked
) -> None:
    """Also where a blend needs them."""
    assert engine.store is not None
    asked = about(BEHIND, picture(15))
    first = ask(engine, asked, namespace=namespace, ratio=1.0)
    settle(engine)
    (state,) = engine.store.states.records(namespace=namespace)
    path = engine.store.states.path(state.model, namespace, state.key)
    os.truncate(path, path.stat().st_size // 2)
    forget(engine)
    answer = ask(engine, asked, namespace=namespace, ratio=1.0)
    assert (answer.report.images_computed, answer.report.kv_cache) == (1, "hit")
    assert answer.report.reason is not None and "cannot be used" in answer.report.reason
    assert_same(answer, first)


def stored_by_asking(engine: Engine, asked: dict[str, Any], namespace: str) -> None:
    """Have the prompt cache store a prompt: what is asked a third time is worth it."""
    for _ in range(3):
        forget(engine)
        ask(engine, asked, namespace=namespace)
    settle(engine)


def test_a_prompt_with_an_image_is_stored_and_found(
    engine: Engine, namespace: str, about: Asked
) -> None:
    """Behind all that is the same its keys have turned by the same positions."""
    asked = about(BEHIND, picture(6))
    expected = plain(engine, asked)
    stored_by_asking(engine, asked, namespace)
    for text in (BEHIND, BEHIND + " and where does it stand"):
        forget(engine)
        before = tower_runs(engine)
        answer = ask(engine, about(text, picture(6)), namespace=namespace)
        report = answer.report
        assert report.exact_tokens > 60, report
        assert report.reused_tokens == 0, report
        assert tower_runs(engine) == before
        assert report.tiers["fusion"] == "skip"
        assert_same(answer, plain(engine, about(text, picture(6))))
    forget(engine)
    other = ask(engine, about(BEHIND, picture(16)), namespace=namespace)
    assert other.report.exact_tokens < 10, "text before another image"
    assert_same(other, plain(engine, about(BEHIND, picture(16))))
    assert_same(ask(engine, asked, namespace=namespace), expected)


def test_chunks_behind_an_image_whose_kv_is_stored(
    engine: Engine, namespace: str, stored: dict[str, int], about: Asked
) -> None:
    """The image is not computed, and says where they stand."""
    begin = about(BEHIND[: BEHIND.index("}") + 1] + " is it new or old ?", picture(7))
    stored_by_asking(engine, begin, namespace)
    asked = about(BEHIND, picture(7))
    reference = plain(engine, asked)
    for options in ({"ratio": 1.0}, {"selector": "none"}):
        forget(engine)
        before = tower_runs(engine)
        answer = ask(engine, asked, namespace=namespace, **options)
        report = answer.report
        assert 0 < report.exact_tokens < report.reused_tokens, report
        assert report.reused_tokens > 0.8 * stored[FACTS]
        assert tower_runs(engine) == before
        if report.recomputed_tokens:
            assert_same(answer, reference)
        else:
            other = answer.token_ids != reference.token_ids
            assert other or largest_difference(answer, reference) > 1e-3


def test_where_the_same_text_stands_behind_another_image_it_is_computed(
    engine: Engine, namespace: str, about: Asked
) -> None:
    """As far as it is stored behind an image alone."""
    stored_by_asking(engine, about(BEHIND, picture(8)), namespace)
    for asked in (about(BEHIND, picture(18)), BEHIND.replace("{}", "")):
        forget(engine)
        answer = ask(engine, asked, namespace=namespace, selector="none")
        assert answer.report.reused_tokens < 10, answer.report
        assert_same(answer, plain(engine, asked))


async def test_several_at_once(
    engine: Engine, namespace: str, stored: dict[str, int], about: Asked
) -> None:
    prompts = [about(BEFORE, picture(7)), about(BEHIND, picture(8)), FACTS + NOTES + QUESTION]
    references = [plain(engine, one) for one in prompts]
    forget(engine)
    reuse = ReuseOptions(namespace=namespace, ratio=1.0)
    answers = await asyncio.gather(
        *(engine.agenerate(one, sampling=SAMPLING, reuse=reuse) for one in prompts)
    )
    for answer, reference in zip(answers, references, strict=True):
        assert_same(answer, reference)
    assert all(answer.report.reused_tokens > 0 for answer in answers)


def test_a_model_whose_text_stands_elsewhere_is_refused(engine: Engine) -> None:
    def reason(worker: Any) -> str:
        from semkv_rag.connector.worker.model.model_view import Unservable, model_layers

        model = worker.model_runner.get_model()
        told = model.get_mrope_input_positions
        model.get_mrope_input_positions = lambda *asked: (told(*asked)[0] + 1, 1)
        try:
            model_layers(model, worker.vllm_config)
        except Unservable as reason:
            return str(reason)
        finally:
            del model.get_mrope_input_positions
        return ""

    assert inside(engine, reason) == "in text its tokens stand at other positions than their number"


def test_features_of_a_seen_image_are_loaded_in_a_new_process(
    engines: Engines, model: Path, tmp_path: Path, about: Asked
) -> None:
    with start(engines, model, store=tmp_path) as first:
        ask(first, about(BEFORE, picture(9)))
        assert tower_runs(first) == 1
        settle(first)
    with start(engines, model, store=tmp_path) as second:
        asked = about(BEHIND, picture(9))
        answer = ask(second, asked, ratio=1.0)
        assert tower_runs(second) == 0
        assert (answer.report.tiers["fusion"], answer.report.images_loaded) == ("hit", 1)
        assert_same(answer, plain(second, asked))
