"""The tokens of chunks that were looked at lately, so that the store is not asked for them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from weakref import WeakValueDictionary

from semkv_rag.reuse.tokens import StoredTokens, TokenArray

_MOST_TOKENS = 1 << 22
"""Tokens that are kept, of chunks and contexts: 16 MB."""


class RecentTokens:
    """Chunks' ids and tokens by number.

    Equal contexts are one array, so that they are judged once (`runs`).

    Args:
        tokens_of: see `ChunkIndex`.
    """

    def __init__(self, tokens_of: Callable[[Sequence[str]], Mapping[str, StoredTokens]]) -> None:
        self._tokens_of = tokens_of
        self._kept: OrderedDict[int, tuple[str, StoredTokens]] = OrderedDict()
        self._size = 0
        self._contexts: WeakValueDictionary[bytes, TokenArray] = WeakValueDictionary()

    def get(
        self, numbers: Iterable[int], id_of: Callable[[int], str | None]
    ) -> dict[int, tuple[str, StoredTokens]]:
        """The ids and tokens of chunks, without those the store no longer has.

        Args:
            id_of: gives a chunk's id, or None when it was removed.
        """
        found: dict[int, tuple[str, StoredTokens]] = {}
        missing: dict[str, int] = {}
        for number in numbers:
            if number in self._kept:
                self._kept.move_to_end(number)
                found[number] = self._kept[number]
            elif (id_ := id_of(number)) is not None:
                missing[id_] = number
        if missing:
            for id_, stored in self._tokens_of(list(missing)).items():
                number = missing[id_]
                found[number] = self._kept[number] = id_, self._sharing_context(stored)
                self._size += len(stored.tokens) + len(stored.context)
            while self._size > _MOST_TOKENS:
                self.forget(next(iter(self._kept)))
        return found

    def forget(self, number: int) -> None:
        """Drop a chunk's tokens."""
        if number in self._kept:
            _, stored = self._kept.pop(number)
            self._size -= len(stored.tokens) + len(stored.context)

    def _sharing_context(self, stored: StoredTokens) -> StoredTokens:
        context = self._contexts.setdefault(stored.context.tobytes(), stored.context)
        return stored if context is stored.context else replace(stored, context=context)
