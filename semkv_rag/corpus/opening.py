"""Documents are opened so that none holds the reader up: regular files only, of bounded size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from semkv_rag.errors import CorpusError

MAX_DOCUMENT_BYTES = 256 * 2**20
"""A larger file is no document."""


@contextmanager
def open_document(path: Path, inside: Path | None = None) -> Iterator[BinaryIO]:
    """A document's file, open for reading from its start.

    What is checked is the open file, so nothing can be put in its place meanwhile.

    Args:
        inside: a folder, resolved, that the file must lie in, whatever links lead to it.

    Raises:
        CorpusError: it is no regular file, too large, or not inside the folder.
        OSError: it cannot be opened.
    """
    _check_kind(path.stat())  # opening a device may do something
    # O_NONBLOCK: should it have become a FIFO, opening it does not wait for whoever writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        _check_kind(status)
        if status.st_size > MAX_DOCUMENT_BYTES:
            raise _too_large(MAX_DOCUMENT_BYTES)
        if inside is not None and not _opened(descriptor).is_relative_to(inside):
            raise CorpusError("a link that leads out of the given folder")
        yield file


def read_whole(file: BinaryIO, most: int = MAX_DOCUMENT_BYTES) -> bytes:
    """All of an open document.

    Args:
        most: bytes it may have.

    Raises:
        CorpusError: it has more.
    """
    data = file.read(most + 1)
    if len(data) > most:
        raise _too_large(most)
    return data


def kind_in_words(mode: int) -> str:
    """What a file that is not regular is."""
    kinds = {
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFDIR: "a folder",
    }
    return kinds.get(stat.S_IFMT(mode), "of an unknown kind")


def _check_kind(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise CorpusError(f"not a regular file but {kind_in_words(status.st_mode)}")


def _too_large(most: int) -> CorpusError:
    return CorpusError(f"larger than {most // 2**20} MiB: split it into smaller files")


def _opened(descriptor: int) -> Path:
    """Where the open file is, with all links followed."""
    return Path(f"/proc/self/fd/{descriptor}").readlink()
