"""Text to chunks, cut where its meaning changes, measured in the model's own tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from semkv_rag.errors import CorpusError, OptionError
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.unicode_text import is_unicode, not_unicode

LONGEST_SENTENCE = 20_000
"""Characters; longer text without the end of a line or sentence is cut here, at a space if it can be.

The splitter takes time that is quadratic in the length of a sentence.
"""

LONGEST_TOKEN = 128
"""Characters; a text is taken to have a token for each so many at least.

There are tokenizers that make one token of any word they do not know, and all of it would be overlap.
"""

_SENTENCE_END = re.compile(r"\n|[.!?]\s|[。！？]")


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a text: characters `start` to `end`, without white space at its ends."""

    text: str
    start: int
    end: int


def split_text(
    text: str, tokenizer: Any, size: int, overlap: int = 0, markdown: bool = False
) -> list[TextChunk]:
    """Cut `text` at the coarsest boundaries (paragraph, sentence, word) that keep to `size`.

    Args:
        text: the whole document.
        tokenizer: the model's Hugging Face tokenizer.
        size: the most tokens of a chunk, counted without special tokens.
        overlap: the most tokens a chunk shares with the one before it.
        markdown: whether headings, lists and code blocks of Markdown are boundaries too.

    Raises:
        OptionError: the sizes make no sense.
        CorpusError: the text cannot be encoded.
    """
    check_sizes(size, overlap)
    if not is_unicode(text):
        raise CorpusError(not_unicode(text))
    kind = MarkdownSplitter if markdown else TextSplitter
    splitter = kind.from_callback(_counter(tokenizer, size), size, overlap)
    return [
        TextChunk(part, first + start, first + start + len(part))
        for first, end in _sections(text)
        for start, part in splitter.chunk_indices(text[first:end])
    ]


def _counter(tokenizer: Any, size: int) -> Callable[[str], int]:
    """Counts a text's tokens, of a text that has more than `size` perhaps only its beginning's.

    The splitter asks for the length of all that is left wherever it finds no boundary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        # A truncating call leaves its setting in the tokenizer; it sets it anew at its next call.
        backend.no_truncation()

        def count(part: str) -> int:
            return len(backend.encode(part, add_special_tokens=False))
    else:

        def count(part: str) -> int:
            return len(tokenize(tokenizer, part))

    # Cutting a text may change the tokens near the cut, so it must not be a near thing.
    characters, enough = 8 * size + 512, size + 64

    def at_least(part: str) -> int:
        least = len(part) // LONGEST_TOKEN
        if least > size:
            return least
        if len(part) > characters and (tokens := count(part[:characters])) > enough:
            return tokens
        return max(count(part), least)

    return at_least


def _sections(text: str) -> Iterator[tuple[int, int]]:
    """Parts of the text to be split each by itself, first and end: the whole but for long sentences."""
    first = sentence = 0
    for end in (*(match.end() for match in _SENTENCE_END.finditer(text)), len(text)):
        while end - sentence > LONGEST_SENTENCE:
            cut = sentence + LONGEST_SENTENCE
            space = text.rfind(" ", sentence + 1, cut)
            sentence = cut if space < 0 else space
            yield first, sentence
            first = sentence
        sentence = end
    yield first, len(text)


def check_sizes(size: int, overlap: int) -> None:
    """Raise OptionError when text cannot be cut into chunks of `size` that share `overlap`."""
    if size < 1 or not 0 <= overlap < size:
        raise OptionError(
            f"chunks of {size} tokens that share {overlap}: use 0 <= overlap < chunk tokens"
        )


def tokenize(tokenizer: Any, text: str, *, special: bool = False) -> TokenArray:
    """The tokens of `text`, [tokens]; with `special`, behind what a prompt starts with (BOS)."""
    return token_array(tokenizer.encode(text, add_special_tokens=special))
