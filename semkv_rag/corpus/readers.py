"""Documents on disk to text: plain text, Markdown, HTML and PDF, by suffix."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bs4 import BeautifulSoup, NavigableString

from semkv_rag.errors import CorpusError


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """A file to be read, and the name its source has in the store.

    The name is the path from the given folder on, that folder's own name included, with `/` between
    (`manuals/pump/setup.md` for the folder `manuals`, wherever it stands): it stays the same when
    the folder moves, and says which sources are a folder's. A file that is given itself has its
    file name.
    """

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """What is under the given paths.

    Attributes:
        documents: the files that can be read, in the order of the paths, sorted within a folder.
        skipped: names of files in folders whose suffix no reader is for.
        folders: the names that the given folders' sources start with.
    """

    documents: tuple[DocumentFile, ...]
    skipped: tuple[str, ...]
    folders: tuple[str, ...]


def find_files(paths: Iterable[Path]) -> FoundFiles:
    """The documents under `paths`, which are files and folders.

    Folders are walked whole, without hidden files and folders, and without following links to
    folders.

    Raises:
        CorpusError: a path does not exist or cannot be listed, a file that is given itself has a
            suffix no reader is for, or two documents would have the same name.
    """
    documents: dict[str, DocumentFile] = {}
    skipped: list[str] = []
    folders: list[str] = []
    for path in paths:
        if not path.exists():
            raise CorpusError(f"{path} does not exist")
        root = path.resolve()
        if path.is_dir():
            folders.append(root.name + "/")
        elif not can_read(path):
            raise CorpusError(f"{path} cannot be read: use {', '.join(sorted(_READERS))}")
        for file in _walk(root) if path.is_dir() else [root]:
            name = file.relative_to(root.parent).as_posix()
            if not can_read(file):
                skipped.append(name)
                continue
            other = documents.setdefault(name, DocumentFile(name, file))
            if other.path != file:
                raise CorpusError(
                    f"{other.path} and {file} would both be called {name}: "
                    "give the folder above them, or another namespace to each"
                )
    return FoundFiles(tuple(documents.values()), tuple(skipped), tuple(folders))


def _walk(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise CorpusError(f"{error.filename} cannot be listed: {error.strerror}")

    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield Path(parent, name)


def can_read(path: Path) -> bool:
    """Whether a reader is there for the file's suffix."""
    return path.suffix.lower() in _READERS


def is_markdown(path: Path) -> bool:
    """Whether the file is to be split by Markdown's structure."""
    return path.suffix.lower() in _MARKDOWN


def read_document(path: Path) -> str:
    """The text of one document.

    Raises:
        CorpusError: it cannot be read; the message says what is wrong with it.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise CorpusError(f"{path.suffix or 'a file without suffix'} is not read")
    try:
        return reader(path)
    except OSError as error:
        raise CorpusError(error.strerror or str(error)) from error


def _read_text(path: Path) -> str:
    data = path.read_bytes()
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise CorpusError(f"not {encoding[:6].upper()} text: {error.reason}") from error
    if "\0" in text:
        raise CorpusError("not text: it has NUL bytes")
    return text


# What a browser sets apart, by the blank space it stands for.
_BREAKS = {
    "\n\n": re.compile(
        "^(address|article|aside|blockquote|dd|div|dl|dt|fieldset|figcaption|figure|footer|form"
        "|h[1-6]|header|hr|main|nav|ol|p|pre|section|table|title|ul)$"
    ),
    "\n": re.compile("^(br|caption|li|tr)$"),
    " ": re.compile("^(td|th)$"),
}
_UNSEEN = ["script", "style", "template", "noscript", "svg"]


def _read_html(path: Path) -> str:
    # The parser finds the encoding by byte order mark, declaration or, failing both, by guessing.
    soup = BeautifulSoup(path.read_bytes(), "html.parser")
    for tag in soup(_UNSEEN):
        tag.decompose()
    for string in soup.find_all(string=True):
        if string.find_parent("pre") is None and type(string) is NavigableString:
            string.replace_with(NavigableString(re.sub(r"\s+", " ", string)))
    for blank, tags in _BREAKS.items():
        for tag in soup(tags):
            tag.insert_after(blank)
            if blank == "\n\n":
                tag.insert_before(blank)
    # One space at a line's start is left of the source's own line breaks; more is a `pre`'s.
    lines = (re.sub(r"^ (?! )", "", line.rstrip()) for line in soup.get_text().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _read_pdf(path: Path) -> str:
    # A third of a second that each of an engine's processes would pay.
    from pypdf import PdfReader

    # pypdf has errors of its own, but a broken file also ends in KeyError, RecursionError and more.
    try:
        with PdfReader(path) as reader:
            text = "\n\n".join(page.extract_text() for page in reader.pages).strip()
    except OSError:
        raise
    except Exception as error:
        raise CorpusError(f"broken or locked PDF: {error or type(error).__name__}") from error
    if not text:
        raise CorpusError("no text in the PDF: are its pages scanned images?")
    return text


_MARKDOWN = (".md", ".markdown")
_READERS: dict[str, Callable[[Path], str]] = {
    **dict.fromkeys((".txt", ".text", ".rst", *_MARKDOWN), _read_text),
    **dict.fromkeys((".html", ".htm", ".xhtml"), _read_html),
    ".pdf": _read_pdf,
}
