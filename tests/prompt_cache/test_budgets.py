"""No text holds up a look-up: what is done to a prompt takes time that is linear in its length."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv_rag.prompt_cache import Normalisation
from semkv_rag.prompt_cache.guard import veto
from semkv_rag.prompt_cache.guard.vetoes import LONGEST_PROMPT
from semkv_rag.prompt_cache.normalise import compatible
from tests.budget import BUDGET_SECONDS, assert_linear, cpu_seconds

LONG = 1_000_000
MARKS = "\u0301\u0334"  # of two classes, so that sorting them moves each


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        "\u0301",
        MARKS,
        "\u0344\u0334",
        "\uff9e\u0334",
        "\u0345\u0301",
        "\U0001d165\u0301",
        "a" + 15 * MARKS,
        "\ufdfa",
        "\u0390",
        "\u1100\u1161\u11a8",
        "\n",
        "1,",
    ],
)
def test_normalising_is_linear(pattern: str) -> None:
    def normalise(length: int) -> Callable[[], object]:
        return partial(Normalisation(), (pattern * length)[:length])

    assert_linear(normalise, LONG)


@given(st.text() | st.text("a\u0301\u0334\uff9eé😀漢", max_size=100))
def test_text_without_long_runs_is_in_nfkc(text: str) -> None:
    marks = "".join("m" if _is_mark(character) else " " for character in text)
    if 31 * "m" not in marks:
        assert compatible(text) == unicodedata.normalize("NFKC", text)


def test_every_mark_of_unicode_is_known() -> None:
    """Whichever mark a run is made of, it is parted."""
    marks = [chr(point) for point in range(0x110000) if _is_mark(chr(point))]
    assert len(marks) > 900
    for mark in marks:
        parted = compatible(MARKS * 20 + mark + MARKS * 20)
        longest = max(len(run) for run in parted.split("\u034f"))
        assert longest <= 31, f"U+{ord(mark):04X}"


def test_a_long_run_is_parted_behind_each_thirty() -> None:
    assert compatible("a" + "\u0334" * 30) == "a" + "\u0334" * 30
    assert compatible("a" + "\u0334" * 61) == "a" + 2 * ("\u0334" * 30 + "\u034f") + "\u0334"
    assert compatible("😀" * 100) == "😀" * 100


def _is_mark(character: str) -> bool:
    return unicodedata.combining(unicodedata.normalize("NFKD", character)[0]) > 0


WORDS = [
    "1,", "1 ", "1.", "1/", "-1", "(", "((", MARKS, "\u200b", "not ", "of ", "a of ", "is ", "do ",
    "have ", "n't", "'s ", "what is the ", "is the largest ", "asked by ", "by what ", "x to ",
    "hundred ", "million ", "\ufdfa", "…", "a_", "aB", "a@", "a@b-", "://", "\n", "what age ",
    "how to ", "May 1 ", "A. ", "v1", "one hundred and ", "can you tell me ",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_the_guard_on_the_longest_prompts(word: str) -> None:
    one = (word * LONGEST_PROMPT)[:LONGEST_PROMPT]
    for other in (one, f"x {one[:-2]}", one[::-1]):
        assert cpu_seconds(partial(veto, one, other)) < BUDGET_SECONDS


def test_the_guard_on_words_that_are_all_different() -> None:
    words = [chr(0x4E00 + number) for number in range(LONGEST_PROMPT // 2)]
    one, other = " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])
    assert cpu_seconds(partial(veto, one, other)) < BUDGET_SECONDS
    assert veto(one, other)


def test_the_guard_on_characters_that_stand_for_many() -> None:
    """U+FDFA is 18 characters in NFKC: what is compared would be far longer than the bound."""
    one, other = "\ufdfa" * LONGEST_PROMPT, "\ufdfb" * LONGEST_PROMPT
    assert cpu_seconds(partial(veto, one, other)) < BUDGET_SECONDS
    found = veto(one, other)
    assert found is not None and "longer than" in found.reason


def test_the_guard_on_random_text() -> None:
    rng = random.Random(0)
    for _ in range(20):
        one, other = ("".join(rng.choices(WORDS, k=200))[:LONGEST_PROMPT] for _ in range(2))
        assert cpu_seconds(partial(veto, one, other)) < BUDGET_SECONDS
