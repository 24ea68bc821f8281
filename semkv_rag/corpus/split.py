"""Text to chunks, cut where its meaning changes, measured in the model's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semantic_text_splitter import MarkdownSplitter, TextSplitter
from tokenizers import Tokenizer

from semkv_rag.errors import OptionError
from semkv_rag.reuse.tokens import TokenArray, token_array


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
    """
    check_sizes(size, overlap)
    kind = MarkdownSplitter if markdown else TextSplitter
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        # A truncating call leaves its setting in the tokenizer; it sets it anew at its next call.
        backend.no_truncation()
        splitter = kind.from_huggingface_tokenizer(backend, size, overlap)
    else:
        splitter = kind.from_callback(lambda part: len(tokenize(tokenizer, part)), size, overlap)
    return [
        TextChunk(part, start, start + len(part)) for start, part in splitter.chunk_indices(text)
    ]


def check_sizes(size: int, overlap: int) -> None:
    """Raise OptionError when text cannot be cut into chunks of `size` that share `overlap`."""
    if size < 1 or not 0 <= overlap < size:
        raise OptionError(
            f"chunks of {size} tokens that share {overlap}: use 0 <= overlap < chunk tokens"
        )


def tokenize(tokenizer: Any, text: str, *, special: bool = False) -> TokenArray:
    """The tokens of `text`, [tokens]; with `special`, behind what a prompt starts with (BOS)."""
    return token_array(tokenizer.encode(text, add_special_tokens=special))
