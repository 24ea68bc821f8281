"""When two prompts count as the same text."""

from __future__ import annotations

import pytest
from PIL import Image

from semkv_rag.prompt_cache import Normalisation
from semkv_rag.prompt_cache.normalise import images_digest, pixels_key, prompt_key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Who leads?", "who LEADS?"),
        ("Straße", "STRASSE"),
        ("ﬁrst", "first"),
        ("Ångström", "A\u030angstro\u0308m"),
        ("\uff21\uff22", "ab"),
        ("a  b\n\tc ", "a b c"),
        ("a\u00a0b", "a b"),
        ("\u0130", "i\u0307"),
    ],
)
def test_the_same_text(one: str, other: str) -> None:
    assert Normalisation()(one) == Normalisation()(other)


@pytest.mark.parametrize("one", ["Straße \u0390 ﬁ \u0345", "\u1fb3", "ǆ \u03d3 K"])
def test_twice_is_once(one: str) -> None:
    normalised = Normalisation()(one)
    assert Normalisation()(normalised) == normalised


def test_other_text() -> None:
    assert Normalisation()("5 mg") != Normalisation()("5mg")
    assert Normalisation()("re-sign") != Normalisation()("resign")


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [("A", "a", "case"), ("a  b", "a b", "white_space"), ("\u00e9", "e\u0301", "unicode")],
)
def test_each_part_can_be_left_out(one: str, other: str, name: str) -> None:
    without = Normalisation(**{name: False})
    assert without(one) != without(other)
    assert Normalisation()(one) == Normalisation()(other)


def test_keys_tell_texts_and_images_apart() -> None:
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    images = [(), (red,), (blue,), (red, blue), (blue, red), (red.convert("L"),)]
    digests = [images_digest([pixels_key(image) for image in found]) for found in images]
    assert len(set(digests)) == len(digests)
    assert digests[0] == ""
    keys = {prompt_key(text, digest) for text in ("a", "b") for digest in digests}
    assert len(keys) == 2 * len(digests)
    assert pixels_key(red.copy()) == digests[1], "of one image, its own key"
    assert prompt_key("\ud800"), "as JSON may bring it in"
