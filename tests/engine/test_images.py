"""Prompts with images: whose KV is reused, and that answers are those of plain vLLM."""

from __future__ import annotations

import base64
import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semkv_rag.config import ReuseOptions
from semkv_rag.engine import Completion, Engine
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.prompt_cache import PerceptualHash, PromptCacheOptions
from workbench.answers import SAMPLING, assert_same, largest_difference
from workbench.chunks import store_chunks
from workbench.engines import Engines
from workbench.inside import inside
from workbench.tiered import tiered
from workbench.tiny_models import IMAGE_SIZE, PATCH_SIZE
from workbench.vqa.tower import tower_calls, watch_tower

ROWS = (IMAGE_SIZE // PATCH_SIZE) ** 2
STEP = 128  # tokens that vLLM computes at a time: longer prompts are prefilled in parts

BEFORE = "the store keeps the keys of each chunk and this is the image "
QUESTION = " who owns this car and what is the colour of it"
OTHER = " where does that river end"

Prompt = Mapping[str, Any]


def picture(seed: int) -> Image.Image:
    """Blurred colours; no two seeds look alike."""
    blocks = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)


def like(image: Image.Image) -> Image.Image:
    """The same image with one pixel brighter: other content, the same perceptual hash."""
    pixels = np.asarray(image).copy()
    pixels[0, 0] = np.minimum(pixels[0, 0].astype(int) + 9, 255)
    assert not np.array_equal(pixels, np.asarray(image))
    return Image.fromarray(pixels)


def prompt(*parts: str | Image.Image) -> Prompt:
    """Text and images in this order, as vLLM takes them."""
    images = [part for part in parts if isinstance(part, Image.Image)]
    text = "".join(part if isinstance(part, str) else "<image>" for part in parts)
    return {"prompt": text, **({"multi_modal_data": {"image": images}} if images else {})}


@pytest.fixture(scope="module")
def vlm(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with engines.own(
        tiny_model("llava"),
        model_impl="transformers",
        limit_mm_per_prompt={"image": 4},
        max_num_batched_tokens=STEP,
        max_num_seqs=8,
    ) as engine:
        assert engine.gate.servable, engine.gate.reason
        assert inside(engine, watch_tower)
        yield engine


@pytest.fixture
def tiering(vlm: Engine) -> Iterator[PromptLookup]:
    with tiered(vlm, PromptCacheOptions(), {"vision": PerceptualHash()}) as tiering:
        yield tiering


@pytest.fixture
def near(vlm: Engine) -> Iterator[PromptLookup]:
    """With near-duplicate images taken for stored ones."""
    with tiered(vlm, PromptCacheOptions(near_images=True), {"vision": PerceptualHash()}) as tiering:
        yield tiering


def plain(engine: Engine, asked: Prompt) -> Completion:
    """The answer of plain vLLM, every token of the prompt computed."""
    sampling = {**SAMPLING, "skip_reading_prefix_cache": True}
    return engine.generate(asked, sampling=sampling, reuse=ReuseOptions(enabled=False))


def ask(engine: Engine, asked: Prompt, namespace: str, **options: Any) -> Completion:
    reuse = ReuseOptions(namespace=namespace, **options)
    return engine.generate(asked, sampling=SAMPLING, reuse=reuse)


def forget(engine: Engine, tiering: PromptLookup | None = None) -> None:
    """Let captures end, then empty all that vLLM itself keeps from one request to the next."""
    if tiering is not None:
        tiering.settle()
    assert engine.reset_prefix_cache()
    assert engine._llm is not None
    engine._loop.call(engine._llm.reset_encoder_cache())


def stored(engine: Engine, namespace: str) -> int:
    assert engine.store is not None
    return sum(record.kind == "prompt" for record in engine.store.chunks(namespace=namespace))


def calls_of(engine: Engine, work: Callable[[], Completion]) -> tuple[Completion, int]:
    """An answer, and how often the vision tower ran for it."""
    before = inside(engine, tower_calls)
    answer = work()
    return answer, inside(engine, tower_calls) - before


def told(answer: Completion) -> tuple[int, int]:
    """Images that went through the vision tower, and images whose features were loaded."""
    return answer.report.images_computed, answer.report.images_loaded


def rows_before(engine: Engine, *parts: str | Image.Image) -> int:
    """Tokens of the beginning of a prompt."""
    return plain(engine, prompt(*parts)).prompt_tokens


def test_the_model_looks_at_its_images(vlm: Engine) -> None:
    """Else the tests below could not fail."""
    answers = [plain(vlm, prompt(BEFORE, picture(seed), QUESTION)) for seed in range(4)]
    for one, other in itertools.combinations(answers, 2):
        assert one.token_ids != other.token_ids or largest_difference(one, other) > 0.1
    assert len({answer.token_ids for answer in answers}) > 1


def test_an_identical_prompt(vlm: Engine, tiering: PromptLookup, namespace: str) -> None:
    asked = prompt(BEFORE, picture(1), QUESTION)
    forget(vlm)
    reference, calls = calls_of(vlm, lambda: plain(vlm, asked))
    assert calls == 1
    forget(vlm)
    first, calls = calls_of(vlm, lambda: ask(vlm, asked, namespace))
    assert calls == 1
    assert (first.report.kv_cache, first.report.served_by) == ("miss", None)
    assert first.report.tiers["exact_text"] == "miss"
    forget(vlm, tiering)
    assert stored(vlm, namespace) == 1
    again, calls = calls_of(vlm, lambda: ask(vlm, asked, namespace))
    assert (calls, *told(again)) == (0, 0, 0), "KV covers the image"
    assert again.report.served_by == "exact_text"
    assert again.report.exact_tokens == again.prompt_tokens - 1
    assert (again.report.reused_tokens, again.report.recomputed_tokens) == (0, 0)
    assert_same(first, reference)
    assert_same(again, reference)


def test_another_question_about_an_image(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    image = picture(2)
    ask(vlm, prompt(BEFORE, image, QUESTION), namespace)
    forget(vlm, tiering)
    asked = prompt(BEFORE, image, OTHER)
    answer, calls = calls_of(vlm, lambda: ask(vlm, asked, namespace))
    assert answer.report.exact_tokens >= rows_before(vlm, BEFORE, image)
    assert answer.report.reused_tokens == calls == 0
    assert_same(answer, plain(vlm, asked))


def test_another_image_under_the_same_text(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    ask(vlm, prompt(BEFORE, picture(3), QUESTION), namespace)
    forget(vlm, tiering)
    for ratio, seed in ((1.0, 4), (0.0, 5)):
        asked = prompt(BEFORE, picture(seed), QUESTION)
        forget(vlm)
        answer, calls = calls_of(vlm, partial(ask, vlm, asked, namespace, ratio=ratio))
        assert answer.report.tiers["exact_text"] == "miss"
        assert answer.report.exact_tokens <= rows_before(vlm, BEFORE, picture(seed)) - ROWS
        assert answer.report.reused_tokens == 0, "nothing of the image or behind it"
        assert (calls, *told(answer)) == (1, 1, 0)
        assert_same(answer, plain(vlm, asked))


def test_prompts_with_a_common_prefix_are_all_stored(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    """As chat templates and system prompts make them."""
    asked = [prompt(BEFORE, picture(seed), QUESTION) for seed in (31, 32, 33)]
    for one in asked:
        ask(vlm, one, namespace)
        forget(vlm, tiering)
    assert stored(vlm, namespace) == 3
    for one in asked:
        answer, calls = calls_of(vlm, partial(ask, vlm, one, namespace))
        assert (calls, answer.report.served_by) == (0, "exact_text")
        assert answer.report.exact_tokens == answer.prompt_tokens - 1
        assert_same(answer, plain(vlm, one))


def test_an_image_behind_a_stored_chunk(vlm: Engine, tiering: PromptLookup, namespace: str) -> None:
    """The chunk stands behind another context than it was computed behind: it is blended."""
    text = "a question about the colour of the car is answered from documents that were found " * 3
    tokens = vlm.tokenizer(text).input_ids
    store_chunks(vlm, [tokens], namespace=namespace)
    asked = prompt("every answer is short . " + text, picture(5), QUESTION)
    reference = plain(vlm, asked)
    for ratio in (1.0, 0.3):
        forget(vlm, tiering)
        answer, calls = calls_of(vlm, partial(ask, vlm, asked, namespace, ratio=ratio))
        assert (calls, *told(answer)) == ((1, 1, 0) if ratio == 1.0 else (0, 0, 1))
        assert 0.8 * len(tokens) < answer.report.reused_tokens <= len(tokens)
        if ratio == 1.0:
            assert_same(answer, reference)
        else:
            assert answer.report.recomputed_tokens < answer.report.reused_tokens
            assert largest_difference(answer, reference) > 0


def test_an_image_is_not_taken_from_behind_another_text(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    """Its KV has seen that text. It is computed, and so is all behind it that has seen it."""
    image = picture(6)
    ask(vlm, prompt(BEFORE, image, QUESTION), namespace)
    forget(vlm, tiering)
    other = "who owns this harbour " + BEFORE
    asked = prompt(other, image, QUESTION)
    for ratio in (1.0, 0.0):
        forget(vlm)
        answer, calls = calls_of(vlm, partial(ask, vlm, asked, namespace, ratio=ratio))
        report = answer.report
        assert report.exact_tokens + report.reused_tokens <= rows_before(vlm, other, image) - ROWS
        assert (calls, *told(answer)) == (0, 0, 1), "its features are what they were"
        if ratio == 1.0:
            assert_same(answer, plain(vlm, asked))


def test_a_few_tokens_before_an_image_are_computed(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    """No crumb of the stored run, which goes on into the image, is blended."""
    image = picture(33)
    ask(vlm, prompt("the ", image, QUESTION), namespace)
    forget(vlm, tiering)
    asked = prompt("who owns this harbour the ", image, QUESTION)
    answer = ask(vlm, asked, namespace, ratio=0.0)
    assert (answer.report.kv_cache, answer.report.reused_tokens) == ("miss", 0)
    assert told(answer) == (0, 1), "its features are in the store"
    assert_same(answer, plain(vlm, asked))


def test_a_question_stored_behind_another_image(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    """Its KV has seen that image: behind this one, whose KV is stored, it is computed."""
    one, two = picture(34), picture(35)
    for stored_first in (prompt(one, QUESTION), prompt(two, OTHER)):
        forget(vlm, tiering)
        ask(vlm, stored_first, namespace)
    forget(vlm, tiering)
    for asked in (prompt(two, QUESTION), prompt("the ", QUESTION)):
        answer = ask(vlm, asked, namespace, ratio=0.0)
        assert answer.report.reused_tokens == 0
        assert_same(answer, plain(vlm, asked))


def test_two_images_swapped(vlm: Engine, tiering: PromptLookup, namespace: str) -> None:
    one, two, three = picture(7), picture(8), picture(9)
    for ratio in (1.0, 0.0):
        ask(vlm, prompt(BEFORE, one, " and ", two, QUESTION), f"{namespace}-{ratio}")
        forget(vlm, tiering)
    up_to_first = rows_before(vlm, BEFORE, one) - ROWS
    up_to_second = rows_before(vlm, BEFORE, one, " and ", two) - ROWS
    for images, limit in (((two, one), up_to_first), ((one, three), up_to_second)):
        asked = prompt(BEFORE, images[0], " and ", images[1], QUESTION)
        for ratio in (1.0, 0.0):
            forget(vlm)
            answer = ask(vlm, asked, f"{namespace}-{ratio}", ratio=ratio)
            assert answer.report.exact_tokens <= limit
            assert answer.report.reused_tokens == 0
            assert_same(answer, plain(vlm, asked))
    assert answer.report.exact_tokens > up_to_first, "the first image's KV is exact"


def test_namespaces_are_apart(vlm: Engine, tiering: PromptLookup, namespace: str) -> None:
    asked = prompt(BEFORE, picture(10), QUESTION)
    ask(vlm, asked, f"{namespace}-other")
    tiering.settle()  # vLLM's own caches stay as they are
    answer = ask(vlm, asked, namespace)
    assert (answer.report.kv_cache, answer.report.exact_tokens) == ("miss", 0)
    assert answer.report.tiers["exact_text"] == "miss"
    assert answer.report.cached_tokens == 0
    assert_same(answer, plain(vlm, asked))


def test_the_prefix_cache_tells_images_apart(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    text = BEFORE + QUESTION  # several blocks before the image, and behind it
    prompts = [prompt(text, picture(seed), QUESTION + OTHER) for seed in (11, 12)]
    forget(vlm)
    for _ in range(3):
        for asked in prompts:
            # The question before the image is stored, too: behind it, it is blended.
            answer = ask(vlm, asked, namespace, ratio=1.0)
            assert_same(answer, plain(vlm, asked))
            tiering.settle()
    assert answer.report.cached_tokens > 0


def test_several_at_once(vlm: Engine, tiering: PromptLookup, namespace: str) -> None:
    # What they have in common is too short to be reused: each is a miss, and is stored.
    prompts = [prompt(picture(20 + seed), QUESTION) for seed in range(8)]
    references = [plain(vlm, asked) for asked in prompts]
    options = ReuseOptions(namespace=namespace)
    forget(vlm)
    vlm.generate_many(prompts[::2], sampling=SAMPLING, reuse=options)
    for hits in ([True, False] * 4, [True] * 8):
        forget(vlm, tiering)
        before = inside(vlm, tower_calls)
        answers = vlm.generate_many(prompts, sampling=SAMPLING, reuse=options)
        for answer, reference in zip(answers, references, strict=True):
            assert_same(answer, reference)
        assert [answer.report.served_by == "exact_text" for answer in answers] == hits
        computed = sum(answer.report.images_computed for answer in answers)
        assert computed == hits.count(False)
        assert 0 <= inside(vlm, tower_calls) - before <= computed  # some in one call


@pytest.mark.parametrize("fault", ["missing", "torn"])
def test_a_bad_file_behind_an_image(
    vlm: Engine, tiering: PromptLookup, namespace: str, fault: str
) -> None:
    """The image is computed: its placeholders are no text."""
    assert vlm.store is not None
    asked = prompt(picture(32), QUESTION)
    first = ask(vlm, asked, namespace)
    forget(vlm, tiering)
    (record,) = (one for one in vlm.store.chunks(namespace=namespace) if one.kind == "prompt")
    path = vlm.store.path(vlm.fingerprint, namespace, record.id)
    if fault == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size // 2)
    answer = ask(vlm, asked, namespace)
    assert answer.report.kv_cache == "miss"
    assert answer.report.reason
    assert_same(answer, first)
    # Nor has vLLM's prefix cache kept anything else.
    again = ask(vlm, prompt(picture(32), QUESTION + OTHER), namespace)
    assert_same(again, plain(vlm, prompt(picture(32), QUESTION + OTHER)))


def test_a_prompt_whose_prefix_could_not_be_filled_in_is_stored(
    vlm: Engine, namespace: str
) -> None:
    """vLLM computes such a prompt, from the first token that was to be filled in."""
    assert vlm.store is not None
    image = picture(34)
    with tiered(vlm, PromptCacheOptions(), {}) as tiering:
        ask(vlm, prompt(BEFORE, image, QUESTION), namespace)
        forget(vlm, tiering)
        (record,) = (one for one in vlm.store.chunks(namespace=namespace) if one.kind == "prompt")
        path = vlm.store.path(vlm.fingerprint, namespace, record.id)
        os.truncate(path, path.stat().st_size // 2)
        asked = prompt(BEFORE, image, QUESTION + OTHER)
        reference = plain(vlm, asked)
        answer = ask(vlm, asked, namespace)
        assert (answer.report.kv_cache, answer.report.served_by) == ("miss", None)
        assert_same(answer, reference)
        forget(vlm, tiering)
        assert stored(vlm, namespace) == 2, "the torn one, which serves no more, and this one"
        again = ask(vlm, asked, namespace)
        assert again.report.served_by == "exact_text"
        assert_same(again, reference)


def test_what_was_in_the_prefix_cache_is_stored(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    asked = prompt(BEFORE, picture(35), QUESTION)
    forget(vlm)
    ask(vlm, asked, namespace, enabled=False)
    answer = ask(vlm, asked, namespace)
    assert answer.report.cached_tokens > 0
    forget(vlm, tiering)
    assert stored(vlm, namespace) == 1
    again, calls = calls_of(vlm, partial(ask, vlm, asked, namespace))
    assert (calls, again.report.served_by) == (0, "exact_text")
    assert_same(again, plain(vlm, asked))


def test_a_prompt_that_is_prefilled_in_parts(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    """The image stands across the end of the first part."""
    filler = "where does that river end and who owns this harbour " * 6
    text = filler
    while (short := STEP - 8 - rows_before(vlm, text)) < 0:
        text = text[: short * 2]
    text += "?" * short
    asked = prompt(text, picture(30), filler * 2)
    reference = plain(vlm, asked)
    assert reference.prompt_tokens > 2 * STEP
    forget(vlm)
    first = ask(vlm, asked, namespace)
    forget(vlm, tiering)
    again, calls = calls_of(vlm, lambda: ask(vlm, asked, namespace))
    assert again.report.exact_tokens == again.prompt_tokens - 1
    assert calls == 0
    forget(vlm)
    other = prompt(text, picture(31), filler * 2)
    third = ask(vlm, other, namespace, ratio=1.0)  # the filler behind the image is blended
    assert third.report.exact_tokens <= STEP - 8
    assert_same(first, reference)
    assert_same(again, reference)
    assert_same(third, plain(vlm, other))


def test_messages_with_images(vlm: Engine, tiering: PromptLookup, namespace: str) -> None:
    def messages(seed: int) -> Sequence[Mapping[str, Any]]:
        file = io.BytesIO()
        picture(seed).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        text = {"type": "text", "text": BEFORE}
        return [
            {
                "role": "user",
                "content": [text, {"type": "image_url", "image_url": {"url": url}}],
            }
        ]

    fields = {"max_tokens": 4, "temperature": 0, "logprobs": True, "ignore_eos": True}

    def respond(seed: int, reuse: ReuseOptions) -> tuple[list[Any], dict[str, Any], int]:
        tokens = vlm.respond(messages(seed), fields=fields, reuse=reuse)
        said = [
            (entry["token"], pytest.approx(entry["logprob"], abs=1e-4))
            for entry in tokens["choices"][0]["logprobs"]["content"]
        ]
        report = tokens["kv_transfer_params"]["semkv"]
        return said, report, tokens["usage"]["prompt_tokens"]

    references = {seed: respond(seed, ReuseOptions(enabled=False))[0] for seed in (40, 41)}
    assert references[40] != references[41]
    options = ReuseOptions(namespace=namespace)
    forget(vlm)
    assert respond(40, options)[0] == references[40]
    forget(vlm, tiering)
    said, report, tokens = respond(40, options)
    assert said == references[40]
    assert (report["served_by"], report["exact_tokens"]) == ("exact_text", tokens - 1)
    said, report, _ = respond(41, options)
    assert said == references[41]
    assert report["tiers"]["exact_text"] == "miss"


# ---- near-duplicate images -----------------------------------------------------------------------


def test_a_near_image_is_found_but_not_used(
    vlm: Engine, tiering: PromptLookup, namespace: str
) -> None:
    image = picture(50)
    ask(vlm, prompt(BEFORE, image, QUESTION), namespace)
    forget(vlm, tiering)
    asked = prompt(BEFORE, like(image), QUESTION)
    answer, calls = calls_of(vlm, lambda: ask(vlm, asked, namespace))
    assert answer.report.served_by == "embedding:vision"
    assert answer.report.reused_tokens == answer.report.images_near == 0
    assert answer.report.exact_tokens <= rows_before(vlm, BEFORE, image) - ROWS
    assert calls == 1
    assert_same(answer, plain(vlm, asked))


def test_a_near_image_is_taken_for_the_stored_one(
    vlm: Engine, near: PromptLookup, namespace: str
) -> None:
    """The answer is that to the stored image, for other questions too; nothing of it is stored."""
    image = picture(51)
    ask(vlm, prompt(BEFORE, image, QUESTION), namespace)
    forget(vlm, near)
    for question in (QUESTION, OTHER):
        asked = prompt(BEFORE, like(image), question)
        forget(vlm)
        answer, calls = calls_of(vlm, partial(ask, vlm, asked, namespace))
        assert answer.report.tiers["embedding:vision"] == "hit"
        assert answer.report.exact_tokens >= rows_before(vlm, BEFORE, image)
        assert answer.report.reused_tokens == calls == 0
        assert_same(answer, plain(vlm, prompt(BEFORE, image, question)))
    near.settle()
    assert stored(vlm, namespace) == 1


def test_blocks_of_a_near_image_are_nobody_elses(
    vlm: Engine, near: PromptLookup, namespace: str
) -> None:
    image = picture(52)
    ask(vlm, prompt(BEFORE, image, QUESTION), namespace)
    forget(vlm, near)
    asked = prompt(BEFORE, like(image), QUESTION + QUESTION)
    ask(vlm, asked, namespace)
    assert vlm._llm is not None
    vlm._llm.prompt_lookup = None  # the same prompt, and its image taken for itself
    answer = ask(vlm, asked, namespace)
    assert_same(answer, plain(vlm, asked))


def test_an_image_that_looks_different_is_computed(
    vlm: Engine, near: PromptLookup, namespace: str
) -> None:
    ask(vlm, prompt(BEFORE, picture(53), QUESTION), namespace)
    forget(vlm, near)
    asked = prompt(BEFORE, picture(54), QUESTION)
    answer, calls = calls_of(vlm, lambda: ask(vlm, asked, namespace))
    assert answer.report.tiers["embedding:vision"] == "miss"
    assert calls == 1
    assert_same(answer, plain(vlm, asked))
