"""Documents that are gone."""

from __future__ import annotations

from collections.abc import Iterable

from semkv_rag.config import check_namespace
from semkv_rag.errors import OptionError
from semkv_rag.store import KVStore
from semkv_rag.unicode_text import is_unicode

AT_ONCE = 64
"""Sources that are removed in one transaction: other writers wait for it."""


def forget_sources(store: KVStore, model: str, namespace: str, names: Iterable[str]) -> int:
    """Remove sources and the chunks that no other source has; how many sources were there.

    Raises:
        OptionError: the namespace cannot be one, or a name is no text; nothing was removed.
        StoreError: the store cannot be written.
    """
    check_namespace(namespace)
    asked = list(names)
    if wrong := [name for name in asked if not isinstance(name, str) or not is_unicode(name)]:
        raise OptionError(f"a source is called {wrong[0]!a}: use a text")
    return sum(
        store.lifecycle.remove(model, namespace, asked[first : first + AT_ONCE]).sources
        for first in range(0, len(asked), AT_ONCE)
    )
