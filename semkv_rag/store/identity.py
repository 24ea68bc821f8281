"""What tells a store from every other one, for the keys of caches.

The name is published. So only a name of our form is taken from the folder: otherwise anybody who can
write to the folder could have the text of any file published.
"""

from __future__ import annotations

import os
import re
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from semkv_rag.store.files.beneath import open_file

FILE: Final = "store.id"
_NAME: Final = re.compile(rb"[0-9a-f]{32}")


def store_identity(root: Path) -> str:
    """The store's own name, kept in its folder: another one after the folder was made anew.

    32 hex digits. A store is named by its path when it can only be read and has none yet, or when what
    stands in its place is none.
    """
    path = root / FILE
    with suppress(FileNotFoundError):
        return _read(path) or _of_path(root)
    made = uuid.uuid4().hex
    draft = root / f".{FILE}.{made}"
    try:
        with os.fdopen(open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(made.encode())
        try:
            os.link(draft, path)  # does nothing where another process was first
        finally:
            draft.unlink()
    except FileExistsError:
        pass
    except OSError:
        return _of_path(root)
    with suppress(FileNotFoundError):  # somebody took it away at once
        return _read(path) or _of_path(root)
    return _of_path(root)


def is_sound(root: Path) -> bool:
    """Whether a store's name stands in its place, or nothing yet."""
    try:
        return _read(root / FILE) is not None
    except FileNotFoundError:
        return True


def _read(path: Path) -> str | None:
    """The name in a file, or None when there is none in it.

    Raises:
        FileNotFoundError: there is no file.
    """
    try:
        with os.fdopen(open_file(path), "rb") as file:
            content = file.read(64)
    except FileNotFoundError:
        raise
    except OSError:
        return None
    return content.decode() if _NAME.fullmatch(content) else None


def _of_path(root: Path) -> str:
    return blake3(os.fsencode(root)).hexdigest(16)
