"""The same chunks under several codecs, side by side in namespaces of their own, to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from semkv_rag.config import ReuseOptions
from semkv_rag.errors import OptionError
from semkv_rag.quality.settings import Setting
from semkv_rag.store import ChunkFile, ChunkKey, KVStore, chunk_id, write_chunk
from semkv_rag.store.codecs import codec_named

if TYPE_CHECKING:
    from semkv_rag.corpus.capture import Capturer


def codec_settings(codecs: Sequence[str], options: ReuseOptions) -> list[Setting]:
    """A setting for each codec: the same options, in the namespace with its chunks.

    Raises:
        OptionError: there is no such codec.
    """
    names = [codec_named(name).name for name in dict.fromkeys(codecs)]
    return [Setting(name, replace(options, namespace=namespace_of(name))) for name in names]


def namespace_of(codec: str) -> str:
    """Where the chunks are that `copy_as` stores by a codec."""
    return f"codec {codec}"


def copy_as(codec: str, store: KVStore, model: str, namespace: str, into: KVStore) -> float:
    """Store a namespace's documents by a codec in another store; the bytes that a token takes.

    Raises:
        OptionError: there are none, or a lossy codec has left something out of them.
        StoreError: a file is damaged, or cannot be written.
    """
    target = namespace_of(codec)
    copies: dict[str, ChunkKey] = {}
    size = tokens = 0
    for record in store.chunks(model, namespace):
        if record.kind == "prompt":
            continue
        for rank in range(record.ranks):
            path = store.path(model, namespace, record.id, rank)
            with ChunkFile(path, model=model, chunk_id=record.id) as file:
                if not file.codec.lossless:
                    raise OptionError(
                        f"the store holds chunks as {file.codec.name}: codecs are compared on a store"
                        " that was precomputed as plain"
                    )
                own = file.header
                id_ = chunk_id(model, target, own.context, own.tokens)
                header = replace(own, id=id_, namespace=target, codec=codec)
                layers = [file.layer(index) for index in range(own.layers)]
                path = into.path(model, target, id_, rank)
                size += write_chunk(path, header, layers, file.sensitivity())
        copies[record.id] = ChunkKey(id_, model, target)
        tokens += record.token_count
    if not copies:
        raise OptionError(f"the store holds no chunks of this model in the namespace {namespace}")
    into.add(copies.values())
    for source in store.sources(model, namespace):
        ids = [copies[id_].id for id_ in source.chunk_ids if id_ in copies]
        into.put_source(model, target, source.name, source.digest, ids)
    return size / tokens


def copies(
    store: KVStore, capturer: Capturer, settings: Sequence[Setting], namespace: str
) -> dict[str, float]:
    """Store a namespace's documents in an engine's store, once for each codec; the bytes of a token.

    Args:
        store: where they are.
        capturer: the engine, or what stores for its model with an adapter.
        settings: by `codec_settings`.

    Raises:
        OptionError, StoreError: as `copy_as`.
    """
    model, into = capturer.fingerprint, capturer.store
    assert into is not None
    into.add_model(model, {})
    return {one.name: copy_as(one.name, store, model, namespace, into) for one in settings}
