"""What tells a store from every other one, for the keys of caches."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress

from semkv_rag.store.kv_store import KVStore

FILE = "store.id"


def store_identity(store: KVStore) -> str:
    """The store's own name, kept in its folder: another one after the folder was made anew.

    A store that can only be read and has none yet is named by its path.
    """
    path = store.root / FILE
    with suppress(OSError):
        return path.read_text(encoding="ascii")
    made = uuid.uuid4().hex
    draft = store.root / f".{FILE}.{made}"
    try:
        draft.write_text(made, encoding="ascii")
        try:
            os.link(draft, path)  # does nothing where another process was first
        finally:
            draft.unlink()
        return path.read_text(encoding="ascii")
    except FileExistsError:
        return path.read_text(encoding="ascii")
    except OSError:
        return str(store.root)
