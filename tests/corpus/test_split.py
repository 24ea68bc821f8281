"""Chunks keep to a size in the model's tokens, and to the text's own boundaries."""

import itertools
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from semkv_rag.corpus import split_text
from semkv_rag.corpus.split import LONGEST_SENTENCE, LONGEST_TOKEN
from semkv_rag.errors import OptionError
from tests.budget import assert_linear


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Each word and mark of punctuation that stands alone is a token; prompts start with <s>."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


class WithoutBackend:
    """A tokenizer that is not of the `tokenizers` library."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [0] * len(text.split())


SENTENCES = " ".join(f"This is the sentence number {n} ." for n in range(12))


def count(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("tokenizer", [word_tokenizer(), WithoutBackend()])
def test_sentences_stay_whole_when_they_fit(tokenizer: object) -> None:
    chunks = split_text(SENTENCES, tokenizer, size=16)
    assert len(chunks) == 6
    for chunk in chunks:
        assert chunk.text.startswith("This")
        assert chunk.text.endswith(".")
        assert count(chunk.text) == 14


def test_special_tokens_do_not_count() -> None:
    assert len(split_text("one two three four", word_tokenizer(), size=4)) == 1


def test_neighbours_share_up_to_the_overlap() -> None:
    chunks = split_text(SENTENCES, word_tokenizer(), 21, 7)
    assert all(count(chunk.text) <= 21 for chunk in chunks)
    for left, right in itertools.pairwise(chunks):
        assert count(SENTENCES[right.start : left.end]) == 7


def test_markdown_is_cut_at_headings() -> None:
    text = "# One\n\nalpha beta gamma\n\ndelta\n\n# Two\n\nepsilon zeta eta\n"
    chunks = split_text(text, word_tokenizer(), 8, markdown=True)
    assert [chunk.text.split()[0:2] for chunk in chunks] == [["#", "One"], ["#", "Two"]]


def test_a_truncating_tokenizer_does_not_hide_the_rest() -> None:
    tokenizer = word_tokenizer()
    tokenizer("one two three", truncation=True, max_length=2)
    assert len(split_text(SENTENCES, tokenizer, 14)) == 6


@given(
    text=st.text(alphabet=st.sampled_from("ab漢é .!\n\t#*-\u00a0"), max_size=200),
    size=st.integers(1, 12),
    markdown=st.booleans(),
)
def test_nothing_but_white_space_is_lost(text: str, size: int, markdown: bool) -> None:
    chunks = split_text(text, word_tokenizer(), size, markdown=markdown)
    position = 0
    for chunk in chunks:
        assert text[chunk.start : chunk.end] == chunk.text
        assert not text[position : chunk.start].strip()
        assert count(chunk.text) <= size
        position = chunk.end
    assert not text[position:].strip()


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (8, 8), (8, -1)])
def test_sizes_that_make_no_sense_are_refused(size: int, overlap: int) -> None:
    with pytest.raises(OptionError, match="overlap"):
        split_text("text", word_tokenizer(), size, overlap)


class Counting:
    """A token for every two characters; counts the characters it was given."""

    def __init__(self) -> None:
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool) -> range:
        self.characters += len(text)
        return range((len(text) + 1) // 2)


@pytest.mark.parametrize(
    ("pattern", "markdown"), [("a", False), ("\u0301\u0334", False), ("> ", True), ("1.1", False)]
)
def test_what_is_measured_is_linear_in_the_text(pattern: str, markdown: bool) -> None:
    """The splitter asks for the length of all that is left, where it finds no boundary."""
    measured = []
    for length in (50_000, 200_000):
        tokenizer = Counting()
        split_text((pattern * length)[:length], tokenizer, 512, 0, markdown)
        measured.append(tokenizer.characters)
    assert measured[1] < 5 * measured[0]


@pytest.mark.slow
@pytest.mark.parametrize("markdown", [False, True])
def test_a_sentence_without_end_takes_linear_time(markdown: bool) -> None:
    def split(length: int) -> Callable[[], object]:
        return partial(split_text, "漢" * length, Counting(), 512, 0, markdown)

    assert_linear(split, 250_000)


def test_a_sentence_without_end_is_cut_at_spaces() -> None:
    text = "a bc " * LONGEST_SENTENCE + ". The end ."
    chunks = split_text(text, word_tokenizer(), size=1000)
    assert all(chunk.text == text[chunk.start : chunk.end] for chunk in chunks)
    assert " ".join(chunk.text for chunk in chunks).split() == text.split()
    assert max(count(chunk.text) for chunk in chunks) <= 1000


def test_a_text_of_sentences_is_not_cut_beforehand() -> None:
    paragraph = " ".join(f"Sentence {n} of many ." for n in range(LONGEST_SENTENCE // 10))
    (whole,) = split_text(paragraph, word_tokenizer(), size=LONGEST_SENTENCE)
    assert whole.text == paragraph


def test_a_word_that_is_one_token_is_cut() -> None:
    """Each chunk would share all but a character with the one before: any part of it is a token."""
    word = "<?" * 10_000
    chunks = split_text(word, word_tokenizer(), size=64, overlap=8)
    assert all(len(chunk.text) <= 65 * LONGEST_TOKEN for chunk in chunks)
    assert sum(len(chunk.text) for chunk in chunks) < 2 * len(word)
