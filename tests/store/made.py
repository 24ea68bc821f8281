"""Small chunks, made from a number: the same number is the same chunk in any process."""

from __future__ import annotations

import numpy as np
import torch

from semkv_rag.store import ChunkHeader, ChunkKey, KVStore, chunk_id, write_chunk

MODEL = "0123456789abcdef" * 4
LAYERS = 2

Layers = list[tuple[torch.Tensor, torch.Tensor]]


def header(
    seed: int,
    *,
    namespace: str = "default",
    model: str = MODEL,
    context: int = 3,
    tokens: int = 16,
    dtype: str = "bfloat16",
    rank: int = 0,
    world_size: int = 1,
    created_at: float = 1000.0,
    layers: int = LAYERS,
) -> ChunkHeader:
    """A chunk's header; chunks of the same `context` length share their context."""
    ids = np.random.default_rng(seed).integers(0, 50_000, tokens, dtype=np.int32)
    left = np.arange(context, dtype=np.int32)
    return ChunkHeader(
        id=chunk_id(model, namespace, left, ids),
        model=model,
        namespace=namespace,
        kind="document",
        tokens=ids,
        context=left,
        dtype=dtype,
        layers=layers,
        rank=rank,
        world_size=world_size,
        created_at=created_at,
    )


def layers(made: ChunkHeader, seed: int = 0) -> Layers:
    """K and V that fit a header, [tokens, 2 heads, 4]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(made.tokens), 2, 4)
    dtype = getattr(torch, made.dtype)

    def tensor() -> torch.Tensor:
        return (torch.rand(shape, generator=generator) * 100).to(dtype)

    return [(tensor(), tensor()) for _ in range(made.layers)]


def sensitivity(made: ChunkHeader, seed: int = 0) -> torch.Tensor:
    """Bytes that fit a header, [layers, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (made.layers, len(made.tokens))
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def write(store: KVStore, made: ChunkHeader) -> ChunkKey:
    """Write a chunk's file, not its row."""
    path = store.path(made.model, made.namespace, made.id, made.rank)
    write_chunk(path, made, layers(made))
    return ChunkKey(made.id, made.model, made.namespace)


def put(
    store: KVStore, seed: int, *, namespace: str = "default", created_at: float = 1000.0
) -> str:
    """Write a chunk and promise it; its id."""
    key = write(store, header(seed, namespace=namespace, created_at=created_at))
    assert store.add([key]) == {key.id}
    return key.id
