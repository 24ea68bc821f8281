"""Documents on disk to text: plain text, Markdown, HTML and PDF, by suffix."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from semkv_rag.corpus.html_text import MAX_HTML_BYTES, html_text
from semkv_rag.corpus.opening import kind_in_words, open_document, read_whole
from semkv_rag.corpus.pdf_text import pdf_text
from semkv_rag.errors import CorpusError
from semkv_rag.unicode_text import is_unicode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A file to be read, and the name its source has in the store.

    The name is the path from the given folder on, that folder's own name included, with `/` between
    (`manuals/pump/setup.md` for the folder `manuals`, wherever it stands): it stays the same when
    the folder moves, and says which sources are a folder's. A file that is given itself has its
    file name.

    Attributes:
        name: see above.
        path: of the file.
        folder: the given folder, resolved, that it must lie in; None for a file given itself.
    """

    name: str
    path: Path
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """What is under the given paths.

    Attributes:
        documents: the files that can be read, in the order of the paths, sorted within a folder.
        skipped: names of files in folders whose suffix no reader is for, and of links out of the
            folder and what is no regular file; why is logged of the latter.
        folders: the names that the given folders' sources start with.
    """

    documents: tuple[DocumentFile, ...]
    skipped: tuple[str, ...]
    folders: tuple[str, ...]


def find_files(paths: Iterable[Path]) -> FoundFiles:
    """The documents under `paths`, which are files and folders.

    Folders are walked whole, without hidden files and folders, and without following links to
    folders. A link to a file within its folder is a document under the link's name.

    Raises:
        CorpusError: a path does not exist or cannot be listed, a file that is given itself has a
            suffix no reader is for or is no regular file, or two documents would have the same name.
    """
    documents: dict[str, DocumentFile] = {}
    skipped: list[str] = []
    folders: list[str] = []
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist")
        root = path.resolve()
        if root.is_dir():
            folders.append(root.name + "/")
        elif not can_read(path):
            raise CorpusError(f"{path} cannot be read: use {', '.join(sorted(_READERS))}")
        folder = root if root.is_dir() else None
        for file in _walk(root) if folder else [root]:
            name = file.relative_to(root.parent).as_posix()
            reason = _unusable(name, file, folder)
            if reason is not None and folder is None:
                raise CorpusError(f"{_printable(str(path))} cannot be read: it is {reason}")
            if reason is not None and can_read(file):
                logger.warning("%s is left out: it is %s", _printable(name), reason)
            if reason is not None or not can_read(file):
                skipped.append(_printable(name))
                continue
            other = documents.setdefault(name, DocumentFile(name, file, folder))
            if other.path != file:
                raise CorpusError(
                    f"{other.path} and {file} would both be called {name}: "
                    "give the folder above them, or another namespace to each"
                )
    return FoundFiles(tuple(documents.values()), tuple(skipped), tuple(folders))


def _unusable(name: str, file: Path, folder: Path | None) -> str | None:
    """What a file is that can be no document, whatever is in it; None for others."""
    if not is_unicode(name):
        return "named in another encoding than UTF-8"
    # The folders on the way are no links.
    if (
        folder is not None
        and file.is_symlink()
        and not Path(os.path.realpath(file)).is_relative_to(folder)
    ):
        return "a link that leads out of the given folder"
    if file.is_file():
        return None
    return kind_in_words(file.stat().st_mode) if file.exists() else "a link to nothing"


def _printable(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise CorpusError(f"{error.filename} cannot be listed: {error.strerror}")

    try:
        for parent, folders, files in os.walk(folder, onerror=fail):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if not name.startswith("."):
                    yield Path(parent, name)
    except RecursionError as error:
        raise CorpusError(f"{folder} cannot be listed: its folders nest too deep") from error


def can_read(path: Path) -> bool:
    """Whether a reader is there for the file's suffix."""
    return path.suffix.lower() in _READERS


def is_markdown(path: Path) -> bool:
    """Whether the file is to be split by Markdown's structure."""
    return path.suffix.lower() in _MARKDOWN


def read_document(path: Path, inside: Path | None = None) -> str:
    """The text of one document.

    Args:
        inside: a folder, resolved, that the file must lie in, whatever links lead to it.

    Raises:
        CorpusError: it cannot be read; the message says what is wrong with it.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CorpusError(f"{path.suffix or 'a file without suffix'} is not read")
    try:
        with open_document(path, inside) as file:
            return reader(file)
    except OSError as error:
        raise CorpusError(error.strerror or str(error)) from error


def _read_text(file: BinaryIO) -> str:
    data = read_whole(file)
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise CorpusError(f"not {encoding[:6].upper()} text: {error.reason}") from error
    if "\0" in text:
        raise CorpusError("not text: it has NUL bytes")
    return text


def _read_html(file: BinaryIO) -> str:
    return html_text(read_whole(file, MAX_HTML_BYTES))


_MARKDOWN = (".md", ".markdown")
_READERS: dict[str, Callable[[BinaryIO], str]] = {
    **dict.fromkeys((".txt", ".text", ".rst", *_MARKDOWN), _read_text),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    ".pdf": pdf_text,
}
