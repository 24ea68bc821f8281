"""A document that was read: all that an engine needs to make its chunks, in this process or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_rag.corpus.readers import DocumentFile, is_markdown, read_document
from semkv_rag.corpus.run import Document, digest_of
from semkv_rag.corpus.split import split_text


@dataclass(frozen=True, slots=True)
class DocumentText:
    """The text of a file, and the name of its source."""

    name: str
    text: str
    markdown: bool

    def document(self, settings: Sequence[object], chunk_tokens: int, overlap: int) -> Document:
        """What a run with these settings makes of it."""

        def split(tokenizer: Any) -> list[str]:
            chunks = split_text(self.text, tokenizer, chunk_tokens, overlap, self.markdown)
            return [chunk.text for chunk in chunks]

        digest = digest_of(*settings, chunk_tokens, overlap, self.markdown, self.text)
        empty = not self.text.strip()
        return Document(self.name, digest, len(self.text), split, empty=empty)


def read_text(file: DocumentFile) -> DocumentText:
    """Read a file.

    Raises:
        CorpusError: it cannot be read; the message says what is wrong with it.
    """
    text = read_document(file.path, file.folder)
    return DocumentText(file.name, text, is_markdown(file.path))
