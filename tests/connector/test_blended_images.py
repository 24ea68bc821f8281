"""Chunks behind an image: the blend computes the image's rows, with the model's own encoder.

With a model whose images are all rows (LLaVA), one whose images have marks between their rows
(Idefics 3), and those with M-RoPE (PaddleOCR-VL, Qwen's), where what stands behind an image is at another
position than its number says. In Qwen3-VL an image's features go into several layers (DeepStack).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.scheduler.admission import ImageRules, note_images
from semkv_rag.connector.scheduler.owners import Owner
from semkv_rag.connector.scheduler.tracked import TrackedRequest
from semkv_rag.engine import Engine
from semkv_rag.report import ReuseReport
from semkv_rag.reuse import Span, first_to_compute, image_key
from tests.connector.pairs import assert_logprobs
from tests.reference import ImageModel
from workbench.answers import SAMPLING, assert_same, largest_difference
from workbench.chunks import Tokens, store_chunks
from workbench.engines import Engines, own_on_ranks
from workbench.fake_device import install
from workbench.inside import inside
from workbench.tiny_models import IMAGE_PROMPTS, QWEN_VL
from workbench.vision import (
    about,
    ask,
    count_tower,
    forget_features,
    of_qwen,
    picture,
    plain,
    tower_runs,
)

FACTS = " a question about the colour of the car is answered from documents that were found" * 3
NOTES = " who owns this harbour and where does that river end every answer is short" * 3
QUESTION = " what is the colour of this car"
BEHIND = "here it is : {}" + FACTS + " and" + NOTES + QUESTION
BETWEEN = "some words :" + FACTS + "{} and another : {}" + NOTES + QUESTION
TEXTS = pytest.mark.parametrize("text", [BEHIND, BETWEEN], ids=["behind", "between"])

MODELS: dict[str, dict[str, Any]] = {
    "llava": {"model_impl": "transformers"},
    "paddleocr_vl": {},
    "idefics3": {},
    **{arch: {} for arch in QWEN_VL},
}
OTHERS = ("llava", "paddleocr_vl")
RANKS = {"two ranks": {"tensor_parallel_size": 2}, "pipeline": {"pipeline_parallel_size": 2}}
CASES = [
    "llava",
    "paddleocr_vl",
    "idefics3",
    *(pytest.param(arch, marks=of_qwen) for arch in QWEN_VL),
    *(pytest.param(f"{arch}, {how}", marks=of_qwen) for arch in QWEN_VL for how in RANKS),
    *(pytest.param(f"{arch}, on a device", marks=pytest.mark.soak) for arch in OTHERS),
    *(pytest.param(f"{arch}, two ranks", marks=pytest.mark.soak) for arch in OTHERS),
]
"""Tensors of a device and of the host do not mix; see `workbench.fake_device`."""


def pictures(text: str, seed: int = 0) -> list[Any]:
    return [picture(10 * seed + place) for place in range(text.count("{}"))]


@dataclass(frozen=True)
class Stocked:
    """An engine whose store has two texts."""

    engine: Engine
    folder: Path
    chunks: list[Tokens]
    ranks: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def mark(self) -> str:
        """What stands for an image in a prompt's text."""
        return IMAGE_PROMPTS[self.folder.name]

    def prompt(self, text: str, seed: int = 0) -> dict[str, Any]:
        return about(text, *pictures(text, seed), mark=self.mark)


@pytest.fixture(scope="module", params=CASES)
def stocked(
    request: pytest.FixtureRequest, engines: Engines, tiny_model: Callable[[str], Path]
) -> Iterator[Stocked]:
    arch, _, how = request.param.partition(", ")
    folder = tiny_model(arch)
    options = {"limit_mm_per_prompt": {"image": 4}, **MODELS[arch]}
    options |= {"max_num_batched_tokens": 128, "max_num_seqs": 8}
    ranks = RANKS.get(how)
    started = (
        engines.own(folder, **options)
        if ranks is None
        else own_on_ranks(engines, folder, ranks, **options)
    )
    with started as engine:
        assert engine.gate.servable, engine.gate.reason
        if how == "on a device":
            assert inside(engine, install) == (True, None)
        count_tower(engine)
        chunks = [engine.tokenizer(text).input_ids for text in (FACTS, NOTES)]
        store_chunks(engine, chunks, namespace="default")
        yield Stocked(engine, folder, chunks, 1 if ranks is None else 2)


@TEXTS
def test_recomputing_everything_is_plain(stocked: Stocked, text: str) -> None:
    expected = plain(stocked.engine, stocked.prompt(text))
    other = plain(stocked.engine, stocked.prompt(text, seed=1))
    looks = expected.token_ids != other.token_ids or largest_difference(expected, other) > 1e-2
    assert looks, "the model looks at its images"
    stocked.engine.reset_prefix_cache()
    answer = ask(stocked.engine, stocked.prompt(text), ratio=1.0)
    assert answer.report.recomputed_tokens == answer.report.reused_tokens == stocked.tokens
    assert_same(answer, expected)
    again = ask(stocked.engine, stocked.prompt(text), ratio=1.0)
    assert again.report.cached_tokens > 0
    assert_same(again, expected)
    assert_same(ask(stocked.engine, stocked.prompt(text, seed=1), ratio=1.0), other)


@TEXTS
def test_none_is_block_diagonal_attention(stocked: Stocked, text: str) -> None:
    reference = ImageModel(stocked.folder)
    in_text = text.replace("{}", stocked.mark), pictures(text)
    assert_logprobs(plain(stocked.engine, stocked.prompt(text)), reference.logprobs(*in_text))
    stocked.engine.reset_prefix_cache()
    answer = ask(stocked.engine, stocked.prompt(text), selector="none")
    assert answer.report.reused_tokens == stocked.tokens
    assert answer.report.recomputed_tokens == 0
    expected = reference.logprobs(*in_text, alone=stocked.chunks)
    assert_logprobs(answer, expected)
    assert (expected - reference.logprobs(*in_text)).abs().max() > 1e-2


@TEXTS
@pytest.mark.parametrize("selector", ["sensitivity_attention", "kv_deviation"])
def test_what_is_in_the_prefix_cache_makes_no_difference(
    stocked: Stocked, text: str, selector: str
) -> None:
    """Nor whether the prompt's first blocks, with a part of an image or without, are found there."""
    engine, options = stocked.engine, {"selector": selector, "ratio": 0.2}
    engine.reset_prefix_cache()
    first = ask(engine, stocked.prompt(text), **options)
    assert 0 < first.report.recomputed_tokens < 0.3 * stocked.tokens
    again = ask(engine, stocked.prompt(text), **options)
    assert again.report.cached_tokens > 0
    assert_same(again, first)
    engine.reset_prefix_cache()
    begun = stocked.prompt(text[: text.index("}") + 1], seed=0)
    plain_begun = {**begun, "multi_modal_data": {"image": pictures(text)[:1]}}
    engine.generate(plain_begun, sampling=SAMPLING, reuse=ReuseOptions(enabled=False))
    found = ask(engine, stocked.prompt(text), **options)
    assert_same(found, first)


def test_an_image_is_encoded_once(stocked: Stocked) -> None:
    """By the blend, whose steps are several, or by vLLM; not by both."""
    engine = stocked.engine
    for text in (BEHIND, BETWEEN):
        engine.reset_prefix_cache()
        forget_features(engine)
        before = tower_runs(engine)
        ask(engine, stocked.prompt(text, seed=2), ratio=0.2)
        assert tower_runs(engine) - before == text.count("{}")


@pytest.mark.parametrize("fault", ["missing", "torn"])
def test_a_bad_file_behind_an_image(stocked: Stocked, namespace: str, fault: str) -> None:
    """vLLM computes all, the image as well."""
    engine = stocked.engine
    assert engine.store is not None
    (chunk,) = store_chunks(engine, stocked.chunks[:1], namespace=namespace)
    path = engine.store.path(engine.fingerprint, namespace, chunk.id)
    if fault == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    expected = plain(engine, stocked.prompt(BEHIND))
    engine.reset_prefix_cache()
    answer = ask(engine, stocked.prompt(BEHIND), namespace=namespace, selector="none")
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason
    assert_same(answer, expected)


def test_an_encoder_that_fails(stocked: Stocked) -> None:
    """In the blend; vLLM's own call may succeed."""
    engine = stocked.engine
    if stocked.ranks > 1:
        pytest.skip("a fault of a forward of several ranks is vLLM's own")
    expected = plain(engine, stocked.prompt(BEHIND))
    engine.reset_prefix_cache()
    forget_features(engine)

    def fail_once(worker: Any) -> None:
        model = worker.model_runner.get_model()

        def fail(**_: Any) -> None:
            del model.embed_multimodal
            raise RuntimeError("out of luck")

        model.embed_multimodal = fail

    inside(engine, fail_once)
    answer = ask(engine, stocked.prompt(BEHIND), ratio=1.0)
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None and "out of luck" in answer.report.reason
    assert_same(answer, expected)


def test_text_that_a_model_counts_in_another_way_is_computed(stocked: Stocked) -> None:
    """By twos, in prompts with images: one turn of its keys fits no chunk."""
    if stocked.folder.name != "paddleocr_vl" or stocked.ranks > 1:
        pytest.skip("of models with M-RoPE; a fault of several ranks is vLLM's own")
    engine = stocked.engine

    def count_by_twos(worker: Any) -> None:
        model = worker.model_runner.get_model()
        told = model.get_mrope_input_positions

        def by_twos(tokens: Any, features: Any) -> Any:
            positions = 2 * told(tokens, features)[0]
            return positions, int(positions.max()) + 1 - len(tokens)

        model.get_mrope_input_positions = by_twos

    def count_as_before(worker: Any) -> None:
        del worker.model_runner.get_model().get_mrope_input_positions

    before = plain(engine, stocked.prompt(BEHIND))
    inside(engine, count_by_twos)
    try:
        expected = plain(engine, stocked.prompt(BEHIND))
        engine.reset_prefix_cache()
        answer = ask(engine, stocked.prompt(BEHIND), selector="none")
    finally:
        inside(engine, count_as_before)
        engine.reset_prefix_cache()
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason is not None
    assert "positions of another kind" in answer.report.reason
    assert_same(answer, expected)
    assert answer.token_ids != before.token_ids or largest_difference(answer, before) > 1e-2


async def test_several_at_once(stocked: Stocked) -> None:
    texts = [BEHIND, BETWEEN, BEHIND.replace("{}", ""), BETWEEN, BEHIND]
    asked = [
        stocked.prompt(text, seed=number) if "{}" in text else text
        for number, text in enumerate(texts)
    ]
    expected = [plain(stocked.engine, one) for one in asked]
    stocked.engine.reset_prefix_cache()
    answers = await asyncio.gather(
        *(
            stocked.engine.agenerate(one, sampling=SAMPLING, reuse=ReuseOptions(ratio=1.0))
            for one in [*asked, *asked[:2]]
        )
    )
    for answer, one in zip(answers, [*expected, *expected[:2]], strict=True):
        assert answer.report.reused_tokens == stocked.tokens
        assert_same(answer, one)


def test_where_no_blend_computes_images_the_report_says_why(
    engines: Engines, tiny_model: Callable[[str], Path]
) -> None:
    options = {"mm_processor_cache_type": "shm", "model_impl": "transformers"}
    with engines.own(tiny_model("llava"), **options) as engine:
        store_chunks(engine, [engine.tokenizer(FACTS).input_ids], namespace="default")
        asked = about(BEHIND, picture(0))
        answer = ask(engine, asked, selector="none")
        assert (answer.report.kv_cache, answer.report.reused_tokens) == ("miss", 0)
        assert answer.report.reason == (
            "its stored chunks stand behind an image, whose KV is not stored"
            ": vLLM hands images on in shared memory; the features of the image are not stored"
        )
        assert_same(answer, plain(engine, asked))


IMAGE = MultiModalFeatureSpec(
    data=MultiModalKwargsItem.dummy(),
    modality="image",
    identifier="a picture",
    mm_position=PlaceholderRange(offset=7, length=4),
)


@pytest.mark.parametrize(
    ("feature", "rules", "near", "blended"),
    [
        (IMAGE, ImageRules(), {}, True),
        (IMAGE, ImageRules(stored=True), {}, True),
        (IMAGE, ImageRules(stored=True), {image_key("a picture"): image_key("its like")}, False),
        (IMAGE, ImageRules(unblended="for a reason"), {}, False),
        (replace(IMAGE, modality="video"), ImageRules(), {}, False),
        (replace(IMAGE, data=None), ImageRules(), {}, False),
    ],
    ids=["alone", "stored", "taken for another", "not in this model", "a video", "without data"],
)
def test_which_images_are_blended(
    feature: MultiModalFeatureSpec, rules: ImageRules, near: dict[str, str], blended: bool
) -> None:
    request = MagicMock(mm_features=[feature])
    tracked = TrackedRequest(request, ReuseOptions(), ReuseReport("miss", 20), Owner(""))
    note_images(tracked, rules, near, store=False)
    (image,) = tracked.images
    assert image.blended is blended
    assert image.from_store
    assert image.positions.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize(
    ("feature", "near", "from_store"),
    [
        (IMAGE, {}, True),
        (replace(IMAGE, modality="video"), {}, True),
        (IMAGE, {image_key("a picture"): image_key("its like")}, False),
        (replace(IMAGE, data=None), {}, False),
    ],
    ids=["alone", "a video", "taken for another", "without data"],
)
def test_which_images_on_a_grid_have_their_kv_from_the_store(
    feature: MultiModalFeatureSpec, near: dict[str, str], from_store: bool
) -> None:
    """Those whose grid is known to be that of what is stored; else a plan ends before them."""
    tracked = TrackedRequest(
        MagicMock(mm_features=[feature]), ReuseOptions(), ReuseReport("miss", 20), Owner("")
    )
    note_images(tracked, ImageRules(grids=True, stored=True), near, store=False)
    (image,) = tracked.images
    assert image.from_store is from_store
    everything = [Span("a", 0, 0, 20, exact=True)]
    assert first_to_compute(everything, [image]) == (None if from_store else 7)
