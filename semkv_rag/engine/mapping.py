"""A token map's texts: each token's own, and the names of the documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from semkv_rag.errors import StoreError
from semkv_rag.store import KVStore
from semkv_rag.token_map import TokenMap

BEFORE: Final = 6
"""Tokens before one that its text may depend on."""


def completed(
    token_map: TokenMap,
    tokens: Sequence[int],
    tokenizer: Any,
    store: KVStore | None,
    model: str,
    namespace: str,
) -> TokenMap:
    """The map with the text of each token, and with what the store knows of each chunk.

    Args:
        tokens: the prompt's.
        store: of the chunks; asked for the namespace's own documents alone.
        model: the fingerprint.
    """
    spans = token_map.spans
    ids = {span.chunk_id for span in spans}
    if store is not None and ids:
        try:
            names = store.sources_of(model, namespace, ids)
            records = store.get(model, namespace, ids)
        except StoreError:  # the answer is there; its chunks have no names
            names, records = {}, {}
        spans = tuple(
            replace(
                span,
                source=names.get(span.chunk_id),
                stored_at=found.created_at if (found := records.get(span.chunk_id)) else None,
            )
            for span in spans
        )
    return replace(token_map, pieces=texts(tokens, tokenizer), spans=spans)


def texts(tokens: Sequence[int], tokenizer: Any) -> tuple[str, ...]:
    """What each token adds to the text; of a character in several tokens, the last adds it."""
    pieces = []
    open_ = 0  # tokens whose text is not whole yet
    for at in range(len(tokens)):
        begin = max(0, at - open_ - BEFORE)
        before = tokenizer.decode(tokens[begin : at - open_], skip_special_tokens=False)
        whole = tokenizer.decode(tokens[begin : at + 1], skip_special_tokens=False)
        if whole.endswith("\ufffd") and open_ < BEFORE:
            pieces.append("")
            open_ += 1
            continue
        pieces.append(whole[len(before) :])
        open_ = 0
    return tuple(pieces)
