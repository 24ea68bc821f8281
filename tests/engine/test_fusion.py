"""Fusion states: a seen image does not go through the vision tower again, whatever else happens."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from vllm.config import ECTransferConfig

from semkv_rag.config import ReuseOptions
from semkv_rag.connector.images.identifiers import parse_identifier, state_identifier
from semkv_rag.connector.images.lookup import LARGEST_FEATURE
from semkv_rag.engine import Completion, Engine, ImageFeatureEncoder
from semkv_rag.engine.launch import engine_arguments, model_fingerprint, resolve, transfer_config
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.prompt_cache import CallableEncoder, Cascade, PromptCacheOptions
from semkv_rag.prompt_cache.vectors.index import Vectors
from semkv_rag.reuse import image_key
from semkv_rag.store import KVStore, place_of
from semkv_rag.store.files import state_file
from semkv_rag.store.files.tensor_writer import write_tensors
from workbench.answers import SAMPLING, assert_same, counted
from workbench.answers import plain as plain_text
from workbench.chunks import random_tokens
from workbench.engines import Engines
from workbench.inside import inside, limit_file_size
from workbench.settings import ENGINE_ARGS
from workbench.tiny_models import IMAGE_PROMPTS
from workbench.vision import (
    about,
    ask,
    count_tower,
    forget_features,
    picture,
    plain,
    settle,
    tower_calls,
)

SEEN = "who owns this harbour {} where does that river end"
ASKED = "the colour of the car is {} answered from documents"
FAR = "one file layer by layer " * 12 + "{} every answer is short"


def _pixels(images: Sequence[Any]) -> Vectors:
    """An image as 64 grey tones around their mean."""
    tones = np.stack([np.asarray(i.convert("L").resize((8, 8)), np.float32) for i in images])
    flat = tones.reshape(len(images), -1)
    return flat - flat.mean(axis=1, keepdims=True)


PIXELS = CallableEncoder("pixels", _pixels, reads="image")


@pytest.fixture(scope="module")
def engine(engines: Engines, tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    """Images in long prompts come in pieces: a step takes 64 tokens."""
    with engines.own(
        tiny_model("idefics3"),
        prompt_cache=PromptCacheOptions(near_images=True),
        encoders={"vision": PIXELS},
        max_num_batched_tokens=64,
    ) as engine:
        count_tower(engine)
        yield engine


def show(engine: Engine, namespace: str, *pictures: Image.Image) -> None:
    """Let the engine see the pictures, and forget them but for the store."""
    for one in pictures:
        assert ask(engine, about(SEEN, one), namespace=namespace).report.images_computed == 1
    settle(engine)
    forget_features(engine)


def state_of(engine: Engine, namespace: str) -> Path:
    """The file of the one state that a namespace has."""
    assert engine.store is not None
    (record,) = engine.store.states.records(namespace=namespace)
    return engine.store.states.path(record.model, record.namespace, record.key)


def asked(engine: Engine, tier: str, outcome: str) -> float:
    """How often a tier of the prompt cache had an outcome."""
    return counted(engine, "semkv_prompt_cache_requests_total", f"{tier} {outcome}")


# ---- a new process ---------------------------------------------------------------------------


@dataclass
class Told:
    """What one engine process answered, and how often its vision tower ran meanwhile."""

    answers: list[Completion]
    references: list[Completion]
    calls: int
    plain_calls: int

    def images(self, what: str) -> list[Any]:
        return [getattr(answer.report, what) for answer in self.answers]

    def fusion(self) -> list[str]:
        return [answer.report.tiers["fusion"] for answer in self.answers]


def question(engine: Engine, mark: str, texts: Sequence[str]) -> Told:
    """Ask about two pictures, with reuse and then plainly."""
    before = tower_calls(engine)
    prompts = [about(text, picture(seed), mark=mark) for text in texts for seed in (1, 2)]
    answers = [ask(engine, prompt) for prompt in prompts]
    calls = tower_calls(engine) - before
    references = [plain(engine, prompt) for prompt in prompts]
    settle(engine)
    return Told(answers, references, calls, tower_calls(engine) - before - calls)


def question_a_new_engine(
    engines: Engines, model: Path, store: Path, mark: str, *texts: str
) -> Told:
    """An engine over a store: its process has seen no image yet."""
    options = PromptCacheOptions()
    with engines.own(model, store=store, prompt_cache=options, encoders={}) as engine:
        count_tower(engine)
        return question(engine, mark, texts)


@pytest.mark.parametrize("arch", ["idefics3", pytest.param("blip2", marks=pytest.mark.soak)])
def test_a_seen_image_in_a_new_process(
    engine: Engine,
    engines: Engines,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    arch: str,
) -> None:
    mark = IMAGE_PROMPTS[arch]
    if arch == "idefics3":
        assert engine.store is not None
        store = engine.store.root
        first = question(engine, mark, [SEEN])
    else:
        store = tmp_path
        first = question_a_new_engine(engines, tiny_model(arch), store, mark, SEEN)
    assert (first.calls, first.plain_calls) == (2, 2)
    assert first.fusion() == ["miss", "miss"]
    assert first.answers[0].token_ids != first.answers[1].token_ids, "the model sees its images"
    again = question_a_new_engine(engines, tiny_model(arch), store, mark, ASKED, SEEN)
    assert again.calls == 0
    assert again.plain_calls == 4
    assert again.fusion() == ["hit", "hit", "skip", "skip"]
    assert again.images("images_loaded") == [1, 1, 0, 0]
    assert again.images("kv_cache") == ["miss", "miss", "hit", "hit"], "there KV covers the image"
    for told in (first, again):
        for answer, reference in zip(told.answers, told.references, strict=True):
            assert_same(answer, reference)


# ---- beside reused KV, in pieces, side by side -------------------------------------------------


def test_where_kv_covers_the_image_nothing_is_asked_for(engine: Engine, namespace: str) -> None:
    show(engine, namespace, picture(1))
    engine.reset_prefix_cache()
    before, skips = tower_calls(engine), asked(engine, "fusion", "skip")
    answer = ask(engine, about(SEEN, picture(1)), namespace=namespace)
    assert tower_calls(engine) == before
    assert answer.report.tiers["fusion"] == "skip"
    assert asked(engine, "fusion", "skip") == skips + 1
    assert (answer.report.images_loaded, answer.report.images_computed) == (0, 0)
    assert answer.report.exact_tokens > 0
    assert_same(answer, plain(engine, about(SEEN, picture(1))))


def test_a_prefix_hit_that_ends_within_the_image(engine: Engine, namespace: str) -> None:
    assert engine.store is not None
    # Blocks are 32 tokens: try all places of the image around the end of the first.
    begins = [2 * tokens * chr(ord("a") + tokens % 26) for tokens in range(24, 32)]
    prompts = [about(begin + "{} first", picture(3)) for begin in begins]
    for prompt in prompts:
        ask(engine, prompt, namespace=namespace)
    settle(engine)
    engine.store.evict(0, namespace, "prompt")
    forget_features(engine)
    before = tower_calls(engine)
    others = [about(begin + "{} another", picture(3)) for begin in begins]
    answers = []
    for other in others:
        forget_features(engine)
        answers.append(ask(engine, other, namespace=namespace))
    assert tower_calls(engine) == before
    within = [a for a in answers if a.report.cached_tokens and a.report.images_loaded]
    assert within, "features were needed although the image begins in a cached block"
    for answer, other in zip(answers, others, strict=True):
        assert_same(answer, plain(engine, other))


def test_an_image_in_a_long_prompt_that_is_computed_in_pieces(
    engine: Engine, namespace: str
) -> None:
    show(engine, namespace, picture(1))
    # Steps end at 64 tokens: try all places of the image around the ends of the second and third.
    prompts = [about("a" * count + FAR, picture(1)) for count in range(8)]
    before = tower_calls(engine)
    answers = [ask(engine, prompt, namespace=namespace, ratio=1.0) for prompt in prompts]
    assert tower_calls(engine) == before
    assert answers[0].report.images_loaded == 1
    for answer, prompt in zip(answers, prompts, strict=True):
        assert_same(answer, plain(engine, prompt))


def test_requests_with_the_same_image_side_by_side(engine: Engine, namespace: str) -> None:
    prompts = [about(f"{number} {ASKED}", picture(4)) for number in range(6)]
    references = [plain(engine, prompt) for prompt in prompts]

    def side_by_side() -> int:
        forget_features(engine)
        before = tower_calls(engine)
        answers = engine.generate_many(
            prompts, sampling=SAMPLING, reuse=ReuseOptions(namespace=namespace)
        )
        for answer, reference in zip(answers, references, strict=True):
            assert_same(answer, reference)
        settle(engine)
        return tower_calls(engine) - before

    assert side_by_side() == 1
    assert engine.store is not None
    engine.store.evict(0, namespace, "prompt")
    engine.reset_prefix_cache()
    assert side_by_side() == 0


def test_a_seen_and_a_new_image_in_one_prompt(engine: Engine, namespace: str) -> None:
    show(engine, namespace, picture(1))
    both = about("left {} and right {} they are", picture(1), picture(2))
    before, misses = tower_calls(engine), asked(engine, "fusion", "miss")
    answer = ask(engine, both, namespace=namespace)
    assert tower_calls(engine) == before + 1
    assert (answer.report.images_loaded, answer.report.images_computed) == (1, 1)
    assert answer.report.tiers["fusion"] == "miss"
    assert asked(engine, "fusion", "miss") == misses + 1
    assert_same(answer, plain(engine, both))


def test_a_near_image_is_taken_for_the_stored_one(engine: Engine, namespace: str) -> None:
    near = picture(1, noise=3)
    show(engine, namespace, picture(1))
    before = tower_calls(engine)
    answer = ask(engine, about(ASKED, near), namespace=namespace)
    assert tower_calls(engine) == before
    assert (answer.report.images_loaded, answer.report.images_near) == (1, 1)
    assert_same(answer, plain(engine, about(ASKED, picture(1))))
    state_of(engine, namespace).unlink()
    forget_features(engine)
    engine.reset_prefix_cache()
    other = "and now {} once more"
    answer = ask(engine, about(other, near), namespace=namespace)
    assert tower_calls(engine) == before + 2, "of one in `plain`"
    assert (answer.report.images_computed, answer.report.images_near) == (1, 0)
    assert "the image it is taken for" in (answer.report.reason or "")
    settle(engine)
    assert engine.store is not None
    keys = {record.key for record in engine.store.states.records(namespace=namespace)}
    assert len(keys) == 2, "the near image's own features are stored under its own key"


def test_the_models_own_features_as_vectors(engine: Engine, namespace: str) -> None:
    assert engine._llm is not None and engine._capturer is not None and engine.store is not None
    encoder = ImageFeatureEncoder()
    with pytest.raises(EngineError, match="give it to one"):
        encoder.encode([picture(1)])
    cascade = Cascade(
        engine.store,
        engine.fingerprint,
        PromptCacheOptions(near_images=True, threshold=0.99),
        {"vision": encoder},
    )
    usual = engine._llm.prompt_lookup
    engine._llm.prompt_lookup = tiering = PromptLookup(cascade, engine._capturer, engine._llm)
    misses, hits = (asked(engine, "embedding:vision", one) for one in ("miss", "hit"))
    try:
        before = tower_calls(engine)
        first = ask(engine, about(SEEN, picture(1)), namespace=namespace)
        assert tower_calls(engine) == before + 1, "for its vector; the request loads it"
        assert first.report.tiers["embedding:vision"] == "miss"
        assert asked(engine, "embedding:vision", "miss") == misses + 1
        assert (first.report.images_loaded, first.report.images_computed) == (1, 0)
        assert_same(first, plain(engine, about(SEEN, picture(1))))
        settle(engine)
        before = tower_calls(engine)
        named = about("a client {} names it", picture(1), uuids=["mine"])
        second = ask(engine, named, namespace=namespace)
        assert tower_calls(engine) == before + 1, "under its name it was not seen yet"
        assert second.report.tiers["embedding:vision"] == "hit"
        assert asked(engine, "embedding:vision", "hit") == hits + 1
        assert (second.report.images_near, second.report.similarity) == (1, 1.0)
        skips = asked(engine, "embedding:vision", "skip")
        once_more = ask(engine, about(SEEN, picture(1)), namespace=namespace)
        assert once_more.report.tiers["exact_text"] == "hit"
        assert asked(engine, "embedding:vision", "skip") == skips + 1
        near = ask(engine, about(ASKED, picture(1, noise=1)), namespace=namespace)
        assert near.report.images_near == 1
        assert near.report.similarity is not None and 0.99 < near.report.similarity < 1
        assert len(list(engine.store.states.records(namespace=namespace))) == 3
    finally:
        engine._llm.prompt_lookup = usual
        tiering.close()
    vectors = encoder.encode([picture(1), picture(1, noise=1), picture(2)])
    assert vectors.shape == (3, 128)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]


# ---- faults ------------------------------------------------------------------------------------


def _forged(state: torch.Tensor, path: Path, *, model: str | None = None) -> None:
    """A file with right checksums, and a state or model of the forger's choice."""
    with state_file.StateFile(path, model=None) as file:
        header = file.header
    model = model or header.model
    metadata = {
        "id": state_file.state_id(model, header.namespace, header.key),
        "model": model,
        "namespace": header.namespace,
        "key": header.key,
        "dtype": str(state.dtype).removeprefix("torch."),
        "created_at": "1.0",
    }
    write_tensors(path, state_file.FORMAT, metadata, {"state": state})


def _state(path: Path) -> torch.Tensor:
    with state_file.StateFile(path, model=None) as file:
        return file.state()


def _corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "corrupt": (_corrupt, "altered"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 100), "torn"),
    "empty": (lambda path: os.truncate(path, 0), "torn"),
    "too short": (lambda path: _forged(_state(path)[:-1], path), r"\[3, 128\], not \[4, 128\]"),
    "too long": (lambda path: _forged(_state(path).repeat(2, 1), path), r"not \[4, 128\]"),
    "too wide": (lambda path: _forged(_state(path).repeat(1, 2), path), r"not \[4, 128\]"),
    "nan": (lambda path: _forged(torch.full((4, 128), float("nan")), path), "NaN"),
    "infinite": (lambda path: _forged(torch.full((4, 128), float("-inf")), path), "infinity"),
    "huge": (lambda path: _forged(torch.full((4, 128), 1e38), path), "values beyond"),
    "too large": (lambda path: _forged(torch.full((4, 128), -32769.0), path), "values beyond"),
    "foreign": (lambda path: _forged(_state(path) + 1, path, model="f" * 64), "another model"),
    "deleted": (Path.unlink, "not stored"),
    "a folder": (_to_folder, "not a file"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_computed_with_a_reason(engine: Engine, namespace: str, fault: str) -> None:
    show(engine, namespace, picture(1))
    path = state_of(engine, namespace)
    spoil, words = FAULTS[fault]
    spoil(path)
    before = tower_calls(engine)
    answer = ask(engine, about(ASKED, picture(1)), namespace=namespace)
    assert tower_calls(engine) == before + 1
    assert answer.report.tiers["fusion"] == "miss"
    assert re.search(words, answer.report.reason or ""), answer.report.reason
    assert_same(answer, plain(engine, about(ASKED, picture(1))))
    settle(engine)
    if path.is_dir():
        path.rmdir()
        return
    before = tower_calls(engine)
    answer = ask(engine, about("healed {} by then", picture(1)), namespace=namespace)
    assert (tower_calls(engine), answer.report.tiers["fusion"]) == (before, "hit")


@pytest.mark.parametrize("value", [LARGEST_FEATURE, -LARGEST_FEATURE, 1e-45, 0.0])
def test_features_that_no_model_computes_harm_no_later_request(
    engine: Engine, namespace: str, value: float
) -> None:
    """They are numbers, and nobody can tell; who asks about this image gets a wrong answer."""
    prompts = [random_tokens(seed, 30 * seed + 5) for seed in range(1, 9)]
    right = [plain_text(engine, prompt) for prompt in prompts]
    show(engine, namespace, picture(1))
    _forged(torch.full((4, 128), value), state_of(engine, namespace))
    hits = asked(engine, "fusion", "hit")
    answer = ask(engine, about(ASKED, picture(1)), namespace=namespace)
    assert answer.report.tiers["fusion"] == "hit"
    assert asked(engine, "fusion", "hit") == hits + 1
    engine.reset_prefix_cache()
    for prompt, expected in zip(prompts, right, strict=True):
        assert_same(plain_text(engine, prompt), expected)
    assert_same(
        ask(engine, about(ASKED, picture(1)), namespace=namespace + " other"),
        plain(engine, about(ASKED, picture(1))),
    )


def test_another_images_file_under_this_name(engine: Engine, namespace: str) -> None:
    assert engine.store is not None
    show(engine, namespace, picture(1), picture(2))
    one, two = (
        engine.store.states.path(record.model, namespace, record.key)
        for record in engine.store.states.records(namespace=namespace)
    )
    one.write_bytes(two.read_bytes())
    two.unlink()
    for seed in (1, 2):
        answer = ask(engine, about(ASKED, picture(seed)), namespace=namespace)
        assert answer.report.images_computed == 1
        assert_same(answer, plain(engine, about(ASKED, picture(seed))))


def test_a_file_that_vanishes_once_it_was_decided_on(engine: Engine, namespace: str) -> None:
    show(engine, namespace, picture(1))
    path = str(state_of(engine, namespace))

    def remove_before_the_workers_load(worker: Any) -> None:
        from pathlib import Path

        from semkv_rag.connector.images.writer import StateWriter

        load = StateWriter.load

        def removing(*arguments: Any) -> None:
            Path(path).unlink()
            StateWriter.load = load
            load(*arguments)

        StateWriter.load = removing

    inside(engine, remove_before_the_workers_load)
    answer = ask(engine, about(ASKED, picture(1)), namespace=namespace)
    assert not Path(path).exists()
    assert answer.report.images_loaded == 1
    assert_same(answer, plain(engine, about(ASKED, picture(1))))


def test_a_full_disk(engine: Engine, namespace: str) -> None:
    limit_file_size(engine, 100)
    try:
        answer = ask(engine, about(SEEN, picture(1)), namespace=namespace)
        settle(engine)
    finally:
        limit_file_size(engine, -1)
    assert_same(answer, plain(engine, about(SEEN, picture(1))))
    assert engine.store is not None
    assert list(engine.store.states.records(namespace=namespace)) == []
    forget_features(engine)
    show(engine, namespace, picture(1))
    assert state_of(engine, namespace).exists()


def test_an_answer_does_not_wait_for_the_disk(engine: Engine, namespace: str) -> None:
    def slow_down(worker: Any) -> None:
        import time

        from semkv_rag.store import states

        write = states.write_state

        def slow(*arguments: Any) -> int:
            time.sleep(5)
            states.write_state = write
            return write(*arguments)

        states.write_state = slow

    ask(engine, about(SEEN, picture(1)), namespace="warm")
    inside(engine, slow_down)
    began = time.monotonic()
    ask(engine, about(SEEN, picture(5)), namespace=namespace)
    assert time.monotonic() - began < 4
    settle(engine)
    assert time.monotonic() - began > 5
    assert state_of(engine, namespace).exists()


def test_what_waits_to_be_written_is_stored_when_the_engine_is_closed(
    engines: Engines, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    pictures = 12

    def hold_back(worker: Any) -> None:
        """Until the writer is told to finish, as it is when the engine is closed."""
        import threading
        import time

        from vllm.distributed.ec_transfer import get_ec_transfer

        from semkv_rag.store import states

        closing, writer = threading.Event(), get_ec_transfer().writer
        flush, write = writer.flush, states.write_state

        def told() -> None:
            closing.set()
            flush()

        def held(*arguments: Any) -> int:
            closing.wait()
            time.sleep(0.1)
            return write(*arguments)

        writer.flush, states.write_state = told, held

    options = {"prompt_cache": PromptCacheOptions(), "encoders": {}, "store": tmp_path}
    with engines.own(tiny_model("idefics3"), **options) as engine:
        inside(engine, hold_back)
        for seed in range(pictures):
            ask(engine, about(SEEN, picture(seed)))
        assert engine.store is not None
        assert list(engine.store.states.records()) == [], "all wait"
    with KVStore(tmp_path) as store:
        assert len(list(store.states.records())) == pictures
        assert store.verify().problems == ()


def test_an_evicted_state_is_computed_and_stored_again(engine: Engine, namespace: str) -> None:
    assert engine.store is not None
    show(engine, namespace, picture(1))
    path = state_of(engine, namespace)
    engine.store.evict(0, namespace, "state")
    assert not path.exists()
    answer = ask(engine, about(ASKED, picture(1)), namespace=namespace)
    assert "not stored" in (answer.report.reason or "")
    settle(engine)
    assert path.exists()


# ---- whose ---------------------------------------------------------------------------------------


def test_namespaces_are_apart(engine: Engine, namespace: str) -> None:
    show(engine, namespace, picture(1))
    before = tower_calls(engine)
    answer = ask(engine, about(ASKED, picture(1)), namespace=f"{namespace}-other")
    assert tower_calls(engine) == before + 1
    assert answer.report.images_computed == 1
    forget_features(engine)
    answer = ask(engine, about(ASKED, picture(1)), namespace=namespace)
    assert answer.report.images_loaded == 1


def test_a_request_without_reuse_neither_loads_nor_saves(engine: Engine, namespace: str) -> None:
    assert engine.store is not None
    ask(engine, about(SEEN, picture(6)), namespace=namespace, enabled=False)
    settle(engine)
    assert list(engine.store.states.records(namespace=namespace)) == []
    show(engine, namespace, picture(6))
    before = tower_calls(engine)
    answer = ask(engine, about(ASKED, picture(6)), namespace=namespace, enabled=False)
    assert tower_calls(engine) == before + 1
    assert "fusion" not in answer.report.tiers


@pytest.mark.parametrize(
    "name",
    [
        "../../evil",
        "/etc/passwd",
        "a" * 100_000,
        "nul\0nul",
        "..",
        "semkv-state:",
        "semkv-state:::::",
    ],
    ids=["up", "absolute", "long", "nul", "parent", "mark", "fields"],
)
def test_a_clients_name_for_its_image_is_no_path(engine: Engine, namespace: str, name: str) -> None:
    assert engine.store is not None
    files = set(engine.store.root.parent.rglob("*"))
    try:
        answer = ask(engine, about(SEEN, picture(1), uuids=[name]), namespace=namespace)
    except (OptionError, UnicodeError):
        return  # vLLM does not take it
    assert_same(answer, plain(engine, about(SEEN, picture(1))))
    settle(engine)
    path = state_of(engine, namespace)
    new = {file for file in set(engine.store.root.parent.rglob("*")) - files if file.is_file()}
    inside_the_store = [
        file for file in new if "states" in file.relative_to(engine.store.root).parts
    ]
    assert inside_the_store == [path]
    forget_features(engine)
    again = ask(engine, about(ASKED, picture(1), uuids=[name]), namespace=namespace)
    assert again.report.images_loaded == 1


def test_a_name_of_ours_is_not_forged(engine: Engine, namespace: str) -> None:
    show(engine, namespace, picture(1))
    (record,) = engine.store.states.records(namespace=namespace) if engine.store else ()
    # Made in this process, with its own secret: the engine's process does not take it for its own.
    forged = state_identifier(namespace, record.key)
    assert parse_identifier(forged) is not None
    before = tower_calls(engine)
    for options in ({"enabled": False}, {"namespace": f"{namespace}-thief"}):
        forget_features(engine)
        engine.reset_prefix_cache()
        answer = ask(engine, about(ASKED, picture(2), uuids=[forged]), **options)
        assert answer.report.images_loaded == 0
    assert tower_calls(engine) == before + 2


def test_names_of_another_process_and_other_texts_say_nothing() -> None:
    name = state_identifier("default", image_key("a"), image_key("b"), save=False)
    ref = parse_identifier(name)
    assert ref is not None
    assert (ref.namespace, ref.key, ref.donor_key) == ("default", image_key("a"), image_key("b"))
    assert not ref.save
    for text in (name[:-1], name + "x", name.replace("default", "other"), "", ":", "\ud800:a:b"):
        assert parse_identifier(text) is None
    namespace = parse_identifier(state_identifier("a:b :c", image_key("a")))
    assert namespace is not None and namespace.namespace == "a:b :c"


# ---- how it is configured ------------------------------------------------------------------------


def test_where_a_model_takes_images_and_there_is_a_store(
    engine: Engine, tiny_model: Callable[[str], Path], reader: Path, tmp_path: Path
) -> None:
    transfer = transfer_config(
        place_of(tmp_path), index_url=None, reuse=ReuseOptions(), request_namespace=True
    )

    def configured(model: Path, store: Any, **arguments: Any) -> Any:
        return resolve(engine_arguments(str(model), {**ENGINE_ARGS, **arguments}), store)[0]

    model = tiny_model("idefics3")
    assert configured(model, None).ec_transfer_config is None
    assert configured(reader, transfer).ec_transfer_config is None
    assert configured(model, transfer, limit_mm_per_prompt={"image": 0}).ec_transfer_config is None
    for given in (False, True):
        config = configured(model, transfer, enable_mm_embeds=given)
        assert config.ec_transfer_config.ec_connector == "ImageFeatureConnector"
        assert config.model_config.multimodal_config.enable_mm_embeds is given
        assert not config.model_config.multimodal_config.allow_missing_mm_embeddings
    other = {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}
    with pytest.raises(OptionError, match="ec_transfer_config"):
        configured(model, transfer, ec_transfer_config=ECTransferConfig(**other))
    # What a client sends in place of an image is refused by the engine that is running.
    embeds = {"prompt": "a <image> b", "multi_modal_data": {"image": torch.zeros(1, 4, 128)}}
    with pytest.raises(OptionError):
        ask(engine, embeds)


def test_the_fingerprint_covers_what_is_done_to_images(
    engine: Engine, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    def fingerprint(folder: Path, **arguments: Any) -> str:
        return model_fingerprint(str(folder), **ENGINE_ARGS, **arguments)

    images, text = (
        shutil.copytree(tiny_model(arch), tmp_path / arch) for arch in ("idefics3", "qwen3")
    )
    first = fingerprint(images)
    assert first == engine.fingerprint, "a copy is the same model"
    assert fingerprint(images, mm_processor_kwargs={"do_rescale": False}) != first
    processor = images / "processor_config.json"
    processor.write_text(processor.read_text().replace("0.5", "0.25"))
    assert fingerprint(images) != first
    before = fingerprint(text)
    (text / "preprocessor_config.json").write_text("{}")
    assert fingerprint(text) == before, "a model without images does not look at it"
