"""The cascade over a real store, with encoders whose similarities are known."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from semkv_rag.errors import OptionError, StoreError
from semkv_rag.prompt_cache import (
    CallableEncoder,
    Cascade,
    Lookup,
    PerceptualHash,
    PromptCacheOptions,
)
from semkv_rag.prompt_cache.vectors.index import Vectors
from semkv_rag.store import KVStore
from tests.prompt_cache.prompts import observe, put_kv, tokens
from tests.store import made
from workbench.word_bags import WORDS, by_words

pytestmark = pytest.mark.slow  # many small ones: seconds, all in all
QUESTION = "which river flows past the old mill near Aldbrook"
PARAPHRASE = "which river flows past the old mill close to Aldbrook"
OTHER = "how long must bread dough rest before it is baked"


def opened(
    store: KVStore,
    options: PromptCacheOptions | None = None,
    **encoders: CallableEncoder | PerceptualHash,
) -> Cascade:
    return Cascade(
        store,
        made.MODEL,
        options or PromptCacheOptions(threshold=0.6),
        encoders or {"semantic": WORDS},
        rng=np.random.default_rng(0),
    )


def ask(cascade: Cascade, text: str, namespace: str = "default", **options: str) -> Lookup:
    return cascade.lookup(text, tokens(text), namespace, **options)


def test_an_identical_prompt(store: KVStore) -> None:
    cascade = opened(store)
    id_ = observe(cascade, store, QUESTION)
    found = ask(cascade, QUESTION)
    assert found.served is not None
    assert (found.served.tier, found.served.donor.id) == ("exact_text", id_)
    assert found.identical
    assert found.statuses == {"exact_text": "hit", "semantic_text": "skip"}
    assert found.encode_ms == 0, "no encoder is asked before the text"


def test_other_case_and_white_space_are_aligned(store: KVStore) -> None:
    for reuse in ("aligned", "substitute"):
        cascade = opened(store, PromptCacheOptions(reuse=reuse))
        observe(cascade, store, QUESTION)
        text = "  WHICH river  flows past the old mill near aldbrook\n"
        found = ask(cascade, text)
        assert found.served is not None and found.served.tier == "exact_text"
        assert not found.identical
        np.testing.assert_array_equal(found.tokens, tokens(text))


def test_the_identical_one_among_those_of_the_same_text(store: KVStore) -> None:
    cascade = opened(store)
    lower = observe(cascade, store, QUESTION.lower())
    upper = observe(cascade, store, QUESTION.upper())
    for text, id_ in ((QUESTION.lower(), lower), (QUESTION.upper(), upper)):
        found = ask(cascade, text)
        assert found.identical
        assert found.served is not None and found.served.donor.id == id_


def test_a_similar_prompt(store: KVStore) -> None:
    cascade = opened(store)
    id_ = observe(cascade, store, QUESTION)
    observe(cascade, store, OTHER)
    found = ask(cascade, PARAPHRASE)
    assert found.served is not None
    assert (found.served.tier, found.served.donor.id) == ("semantic_text", id_)
    assert found.statuses == {"exact_text": "miss", "semantic_text": "hit"}
    np.testing.assert_array_equal(found.tokens, tokens(PARAPHRASE))
    one, other = by_words([QUESTION, PARAPHRASE])
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert found.served.similarity == pytest.approx(cosine, abs=1e-5)

    missed = ask(cascade, "is there a station in the north")
    assert missed.served is None
    assert missed.statuses == {"exact_text": "miss", "semantic_text": "miss"}
    assert all("is below 0.6" in (one.stopped or "") for one in missed.candidates)


def test_an_empty_store(store: KVStore) -> None:
    found = ask(opened(store), QUESTION)
    assert found.statuses == {"exact_text": "miss", "semantic_text": "miss"}
    assert (found.candidates, found.reasons) == ((), {})
    assert str(opened(store).explain("a", tokens("a"))) == "no stored prompt resembles it"


def test_tenants_are_apart(store: KVStore) -> None:
    cascade = opened(store)
    observe(cascade, store, QUESTION, namespace="mine")
    for text in (QUESTION, PARAPHRASE):
        assert ask(cascade, text, "mine").served is not None
        found = ask(cascade, text, "theirs")
        assert (found.served, found.candidates) == (None, ())
        assert cascade.explain(text, tokens(text), "theirs").candidates == ()
    with pytest.raises(OptionError, match="namespace"):
        ask(cascade, QUESTION, "")


def test_another_model_sees_nothing(store: KVStore) -> None:
    observe(opened(store), store, QUESTION)
    with Cascade(store, "f" * 64, PromptCacheOptions(), {"semantic": WORDS}) as another:
        assert ask(another, QUESTION).candidates == ()


def test_another_version_of_the_source(store: KVStore) -> None:
    cascade = opened(store)
    observe(cascade, store, QUESTION, source_version="1")
    for text in (QUESTION, PARAPHRASE):
        assert ask(cascade, text, source_version="1").served is not None
        found = ask(cascade, text, source_version="2")
        assert found.served is None
        assert not found.identical
        assert {one.stopped for one in found.candidates} == {"source version '1', not '2'"}


def test_a_prompt_that_went(store: KVStore) -> None:
    cascade = opened(store)
    id_ = observe(cascade, store, QUESTION)
    assert ask(cascade, PARAPHRASE).served is not None
    store.remove(made.MODEL, "default", [id_])
    for text in (QUESTION, PARAPHRASE):
        assert ask(cascade, text).candidates == ()
    assert not cascade.observe(QUESTION, tokens(QUESTION)), "its KV is not stored"
    put_kv(store, QUESTION)
    assert cascade.observe(QUESTION, tokens(QUESTION))
    assert ask(cascade, PARAPHRASE).served is not None


def test_encoded_only_once(store: KVStore) -> None:
    asked: list[str] = []

    def counting(texts: Sequence[str]) -> Vectors:
        asked.extend(texts)
        return by_words(texts)

    cascade = opened(store, semantic=CallableEncoder("words", counting))
    found = ask(cascade, QUESTION)
    put_kv(store, QUESTION)
    assert cascade.observe(QUESTION, tokens(QUESTION), vectors=found.vectors)
    assert asked == [QUESTION]
    assert ask(cascade, PARAPHRASE).served is not None


def observe_elsewhere(root: Path) -> None:
    with KVStore(root) as store, opened(store) as cascade:
        observe(cascade, store, QUESTION)


def test_what_another_process_stores(store: KVStore) -> None:
    cascade = opened(store)
    assert ask(cascade, PARAPHRASE).served is None
    other = multiprocessing.get_context("fork").Process(
        target=observe_elsewhere, args=(store.root,)
    )
    other.start()
    other.join()
    assert other.exitcode == 0
    assert ask(cascade, PARAPHRASE).served is not None
    assert ask(cascade, QUESTION).identical
    assert ask(opened(store), PARAPHRASE).served is not None, "and a new cascade"


def test_threads(store: KVStore) -> None:
    cascade = opened(store)

    def work(number: int) -> bool:
        text = f"prompt number{number} about topic{number} and subject{number}"
        observe(cascade, store, text)
        return ask(cascade, text).identical and ask(cascade, f"{text} please").served is not None

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(30)))


# ---- substitute ----------------------------------------------------------------------------

SAME = "what is the capital of France"
SAME_TOO = "What's the capital of France?"
LOOKALIKE = "what is the capital of Sweden"


def alike(texts: Sequence[str]) -> Vectors:
    """Every text is like every other: only the guard can tell them apart."""
    return np.tile(np.array([1.0, 0.0], np.float32), (len(texts), 1))


ALIKE = CallableEncoder("alike", alike)


def test_a_lookalike_is_vetoed_however_similar(store: KVStore) -> None:
    cascade = opened(store, PromptCacheOptions(reuse="substitute", delta=0.5), semantic=ALIKE)
    observe(cascade, store, SAME)
    found = ask(cascade, LOOKALIKE)
    assert (found.served, found.explored) == (None, None)
    assert found.candidates[0].similarity == pytest.approx(1)
    assert "France" in (found.candidates[0].stopped or "")
    assert "France" in str(cascade.explain(LOOKALIKE, tokens(LOOKALIKE)))
    with opened(store, PromptCacheOptions(), semantic=ALIKE) as aligned:
        assert ask(aligned, LOOKALIKE).served is not None, "the differing tokens are computed"


@pytest.mark.slow
def test_a_paraphrase_serves_once_its_outcomes_allow_it(store: KVStore) -> None:
    cascade = opened(store, PromptCacheOptions(reuse="substitute", delta=0.05), semantic=ALIKE)
    observe(cascade, store, SAME)
    first = ask(cascade, SAME_TOO)
    assert first.served is None
    assert first.explored is not None
    assert first.statuses["semantic_text"] == "miss"
    np.testing.assert_array_equal(first.tokens, tokens(SAME_TOO))
    for _ in range(400):
        assert cascade.record(first.explored, correct=True)
    served = [found for found in (ask(cascade, SAME_TOO) for _ in range(20)) if found.served]
    assert served
    np.testing.assert_array_equal(served[0].tokens, tokens(SAME))
    assert served[0].statuses == {"exact_text": "miss", "semantic_text": "hit"}
    assert served[0].explored is None
    assert not cascade.wants(served[0]), "this prompt was not computed"
    for _ in range(400):
        cascade.record(first.explored, correct=False)
    assert not any(ask(cascade, SAME_TOO).served for _ in range(20))


def test_outcomes_of_another_encoder_do_not_count(store: KVStore) -> None:
    cascade = opened(store, PromptCacheOptions(reuse="substitute", delta=0.05), semantic=ALIKE)
    observe(cascade, store, SAME)
    first = ask(cascade, SAME_TOO)
    assert first.explored is not None
    for _ in range(400):
        cascade.record(first.explored, correct=True)
    renamed = CallableEncoder("alike, retrained", alike)
    with opened(
        store, PromptCacheOptions(reuse="substitute", delta=0.05), semantic=renamed
    ) as other:
        observe(other, store, SAME)
        assert not any(ask(other, SAME_TOO).served for _ in range(20))


def test_it_fails_closed(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cascade = opened(store, PromptCacheOptions(reuse="substitute", delta=0.05), semantic=ALIKE)
    observe(cascade, store, SAME)
    first = ask(cascade, SAME_TOO)
    assert first.explored is not None
    for _ in range(400):
        cascade.record(first.explored, correct=True)

    def broken(*_: object, **__: object) -> None:
        raise StoreError("the disk is on fire")

    for part, name in ((store.prompts, "outcomes"), (store, "tokens")):
        with monkeypatch.context() as patch:
            patch.setattr(part, name, broken)
            assert not any(ask(cascade, SAME_TOO).served for _ in range(20))
    with monkeypatch.context() as patch:
        patch.setattr("semkv_rag.prompt_cache.guarding.veto", broken)
        found = ask(cascade, SAME_TOO)
        assert (found.served, found.explored) == (None, None)
        assert "the guard failed" in (found.candidates[0].stopped or "")


# ---- faults --------------------------------------------------------------------------------


def test_no_fault_fails_a_look_up(store: KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(texts: Sequence[str]) -> Vectors:
        raise RuntimeError("no such device")

    cascade = opened(store, semantic=WORDS, prompt=CallableEncoder("broken", broken))
    with opened(store) as writer:
        observe(writer, store, QUESTION)
    found = ask(cascade, PARAPHRASE)
    assert found.reasons == {"embedding:prompt": "RuntimeError: no such device"}
    assert found.served is not None and found.served.tier == "semantic_text", "the next tier"
    assert "no such device" in str(cascade.explain(PARAPHRASE, tokens(PARAPHRASE)))
    for name in ("with_key", "vector_changes", "get"):
        with monkeypatch.context() as patch:
            patch.setattr(store.prompts, name, lambda *_: 1 / 0)
            found = ask(cascade, PARAPHRASE)
            assert "ZeroDivisionError" in " ".join(found.reasons.values())
    store.close()
    found = ask(cascade, QUESTION)
    assert found.served is None
    assert set(found.reasons) == {"exact_text", "embedding:prompt", "semantic_text"}


def test_vectors_of_another_length(store: KVStore) -> None:
    with opened(store) as writer:
        observe(writer, store, QUESTION)
    short = CallableEncoder("words", lambda texts: np.ones((len(texts), 3), np.float32))
    found = ask(opened(store, semantic=short), PARAPHRASE)
    assert "give it another name" in found.reasons["semantic_text"]


# ---- embedding layers ----------------------------------------------------------------------


def frame(shift: int, colour: str = "red") -> Image.Image:
    image = Image.new("RGB", (128, 96), "white")
    drawing = ImageDraw.Draw(image)
    drawing.rectangle((10 + shift, 20, 50 + shift, 60), fill=colour)
    drawing.ellipse((80, 50, 110, 80), fill="blue")
    return image


def test_the_layers_of_the_embedding_tier(store: KVStore) -> None:
    layers = {"vision": PerceptualHash(), "prompt": WORDS, "semantic": WORDS}
    cascade = opened(store, PromptCacheOptions(threshold=0.8), **layers)
    id_ = observe(cascade, store, QUESTION, images=[frame(0)])
    observe(cascade, store, OTHER)
    about = "describe this picture"
    found = cascade.lookup(about, tokens(about), images=[frame(1)])
    assert found.served is not None
    assert (found.served.tier, found.served.donor.id) == ("embedding:vision", id_)
    assert found.statuses == {
        "exact_text": "miss",
        "semantic_text": "skip",
        "embedding:vision": "hit",
        "embedding:prompt": "miss",
    }
    without = ask(cascade, f"{OTHER} today")
    assert without.statuses["embedding:vision"] == "skip"
    assert without.statuses["embedding:prompt"] == "hit"
    assert list(without.vectors) == list(found.vectors)[1:]


def test_text_is_not_like_text_about_another_image(store: KVStore) -> None:
    cascade = opened(store)
    observe(cascade, store, QUESTION, images=[frame(0)])
    for images in ([], [frame(60, "green")]):
        found = cascade.lookup(PARAPHRASE, tokens(PARAPHRASE), images=images)
        assert found.served is None
        assert found.candidates[0].stopped == "other images"
        assert not cascade.lookup(QUESTION, tokens(QUESTION), images=images).identical
    found = cascade.lookup(PARAPHRASE, tokens(PARAPHRASE), images=[frame(0)])
    assert found.served is not None


def test_layers_have_thresholds(store: KVStore) -> None:
    options = PromptCacheOptions(thresholds={"semantic": 0.999})
    cascade = opened(store, options, semantic=WORDS)
    observe(cascade, store, QUESTION)
    assert ask(cascade, PARAPHRASE).served is None
    with pytest.raises(OptionError, match=r"\['vision'\]: the layers are \['semantic'\]"):
        opened(store, PromptCacheOptions(thresholds={"vision": 0.9}))


# ---- what is stored ------------------------------------------------------------------------


def test_what_is_captured(store: KVStore) -> None:
    length = len(tokens(QUESTION))
    for options, wanted in (
        (PromptCacheOptions(), [True, True]),
        (PromptCacheOptions(capture=False), [False, False]),
        (PromptCacheOptions(capture_longer_than=length - 1), [True, True]),
        (PromptCacheOptions(capture_longer_than=length), [False, False]),
        (PromptCacheOptions(capture_after=2), [False, True]),
    ):
        cascade = opened(store, options)
        assert [cascade.wants(ask(cascade, QUESTION)) for _ in range(2)] == wanted, options
    cascade = opened(store)
    observe(cascade, store, QUESTION)
    assert not cascade.wants(ask(cascade, QUESTION)), "it is stored"
    assert cascade.wants(ask(cascade, QUESTION.upper())), "its KV is not"


def test_prompts_stay_within_their_bytes(store: KVStore) -> None:
    document = made.put(store, 1, created_at=1.0)
    sizes = []
    for number in range(4):
        cascade = opened(
            store, PromptCacheOptions(capture_bytes=sum(sizes[:2]) if number > 1 else None)
        )
        id_ = observe(cascade, store, f"{QUESTION} {number}")
        found = store.get(made.MODEL, "default", [id_])
        sizes += [record.bytes for record in found.values()]
    kinds = [record.kind for record in store.chunks()]
    assert kinds.count("prompt") == 2
    assert store.get(made.MODEL, "default", [document]), "documents are not pushed out"


# ---- what is told --------------------------------------------------------------------------


def test_an_explanation_asks_every_tier(store: KVStore) -> None:
    cascade = opened(store)
    observe(cascade, store, QUESTION)
    observe(cascade, store, OTHER)
    explained = cascade.explain(QUESTION, tokens(QUESTION))
    assert [one.tier for one in explained.candidates] == ["exact_text"] + 2 * ["semantic_text"]
    lines = str(explained).splitlines()
    assert lines[0] == f"exact_text 1.000 {QUESTION!r}: serves"
    assert lines[1] == f"semantic_text 1.000 {QUESTION!r}: could serve"
    assert "is below 0.6" in lines[2]
