"""What the store has of a prompt, found without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from semkv_rag.config import ReuseOptions
from semkv_rag.report import ReuseReport
from semkv_rag.reuse import ChunkIndex, make_plan, token_array
from semkv_rag.reuse.mapped import token_map
from semkv_rag.store import KVStore

READ_AT_ONCE: Final = 1000


def stored_of(
    store: KVStore, model: str, namespace: str, tokens: Sequence[int], tokenizer: Any
) -> ReuseReport:
    """The report of a prompt whose stored chunks are found, with its token map; nothing is computed.

    Args:
        model: the fingerprint.
        tokens: the prompt's.
    """
    from semkv_rag.engine.mapping import completed

    index = ChunkIndex(partial(store.tokens, model, namespace, patient=True))
    ids = [record.id for record in store.chunks(model, namespace)]
    for first in range(0, len(ids), READ_AT_ONCE):
        found = store.tokens(model, namespace, ids[first : first + READ_AT_ONCE], patient=True)
        index.add((id_, chunk.tokens) for id_, chunk in found.items())
    options = ReuseOptions(namespace=namespace)
    plan = make_plan(index.match(token_array(tokens)), len(tokens), options)
    shown = completed(token_map(plan), tokens, tokenizer, store, model, namespace)
    return ReuseReport(
        kv_cache="miss" if plan is None else "hit",
        prompt_tokens=len(tokens),
        exact_tokens=plan.exact_tokens if plan else 0,
        reused_tokens=plan.reused_tokens if plan else 0,
        chunk_ids=tuple(span.chunk_id for span in plan.spans) if plan else (),
        reason=None if plan else "no stored chunk was found in the prompt",
        token_map=shown,
    )
