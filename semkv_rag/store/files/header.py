"""What a chunk file says of itself: a `ChunkHeader`, and the metadata and tensors it stands in.

Pure: no file is touched here. docs/store.md is the specification.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from blake3 import blake3

from semkv_rag.config import check_namespace
from semkv_rag.errors import ChunkFileError
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.store.files.tensor_file import TensorEntry
from semkv_rag.store.files.tensor_format import FileFormat, dtype_name

FORMAT: Final = FileFormat("semkv.chunk", 2, "chunk file", ChunkFileError)
KINDS: Final = ("document", "head", "prompt")
"""A prompt prefix is a `head` in stored files and in the index, which stay readable."""
TOKEN_TENSORS: Final = ("tokens", "context")
SENSITIVITY: Final = "sensitivity"
"""The tensor that a chunk may have besides: `semkv_rag.blend.sensitivity`."""
MAX_RANKS: Final = 1024
MAX_TOKENS: Final = 1 << 24
"""Of a chunk, and of its context: they are read whole when its file is opened."""
_MODEL: Final = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]{0,127}")


@dataclass(frozen=True, slots=True, eq=False)
class ChunkHeader:
    """Everything the index holds of a chunk, so that it can be rebuilt from the files alone.

    Attributes:
        id: the content address, `chunk_id(model, namespace, context, tokens)`.
        model: fingerprint of the model that computed the KV.
        namespace: the tenant it belongs to.
        kind: `document`, `head` (a prompt prefix) or `prompt` (a whole prompt, a donor).
        tokens: the chunk's tokens, [tokens] int32; one row of KV each.
        context: the tokens that stood to their left, [context tokens] int32.
        dtype: torch's name of the K and V dtype, such as `bfloat16`.
        layers: K and V pairs in the file.
        rank, world_size: the tensor-parallel rank whose KV heads these are, of how many.
        created_at: seconds since the epoch.
    """

    id: str
    model: str
    namespace: str
    kind: str
    tokens: TokenArray
    context: TokenArray
    dtype: str
    layers: int
    rank: int = 0
    world_size: int = 1
    created_at: float = field(default_factory=time.time)

    @property
    def base(self) -> int:
        """The position that token 0 had when its KV was computed."""
        return len(self.context)


def chunk_id(model: str, namespace: str, context: TokenArray, tokens: TokenArray) -> str:
    """The content address of a chunk: 64 hex digits of BLAKE3.

    Args:
        model: the model's fingerprint.
        namespace: the tenant; the same text in two namespaces is two chunks.
        context: the tokens to the left, [context tokens].
        tokens: the chunk's tokens, [tokens].
    """
    hasher = blake3()
    for part in (model.encode(), namespace.encode(), token_bytes(context), token_bytes(tokens)):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def token_bytes(tokens: TokenArray) -> bytes:
    """Tokens as they are stored everywhere: little-endian int32."""
    return token_array(tokens).astype("<i4", copy=False).tobytes()


def layer_names(layer: int) -> tuple[str, str]:
    """The names of a layer's K and V; in the order of the layers when sorted."""
    return f"{layer:04d}.k", f"{layer:04d}.v"


def metadata_of(header: ChunkHeader) -> dict[str, str]:
    """The header as it stands in the file, but for the token tensors."""
    return {
        "id": header.id,
        "model": header.model,
        "namespace": header.namespace,
        "kind": header.kind,
        "dtype": header.dtype,
        "layers": str(header.layers),
        "rank": str(header.rank),
        "world_size": str(header.world_size),
        "created_at": repr(header.created_at),
    }


def header_of(metadata: Mapping[str, str], tokens: TokenArray, context: TokenArray) -> ChunkHeader:
    """The header out of its metadata and token tensors, which must give its content address.

    Raises:
        ChunkFileError: they give another one, or a field is not what it must be.
    """
    try:
        header = ChunkHeader(
            id=metadata["id"],
            model=metadata["model"],
            namespace=metadata["namespace"],
            kind=metadata["kind"],
            tokens=tokens,
            context=context,
            dtype=metadata["dtype"],
            layers=int(metadata["layers"]),
            rank=int(metadata["rank"]),
            world_size=int(metadata["world_size"]),
            created_at=float(metadata["created_at"]),
        )
    except (KeyError, ValueError) as error:
        raise ChunkFileError(f"its header cannot be understood: {error!r}") from error
    if fault := fault_of(header):
        raise ChunkFileError(fault)
    return header


def fault_of(header: ChunkHeader) -> str | None:
    """What cannot be in a header, in words; None when it can stand in a file and in the index."""
    try:
        check_owner(header.model, header.namespace, header.created_at)
    except ValueError as error:
        return str(error)
    if chunk_id(header.model, header.namespace, header.context, header.tokens) != header.id:
        return "its tokens are not those that its id was made of"
    if header.kind not in KINDS:
        return f"its kind is {header.kind!r}"
    if not 0 <= header.rank < header.world_size <= MAX_RANKS:
        return f"it cannot be rank {header.rank} of {header.world_size}"
    return None


def check_owner(model: str, namespace: str, created_at: float) -> None:
    """What headers of chunks and of states have in common can stand in the index.

    Raises:
        ValueError: it cannot; says what.
    """
    if not _MODEL.fullmatch(model):
        raise ValueError(f"its model {model[:16]!r} cannot be a fingerprint")
    check_namespace(namespace)
    if not (math.isfinite(created_at) and created_at >= 0):
        raise ValueError(f"it cannot have been made at {created_at}")


def check_entries(metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]) -> None:
    """Every tensor that a chunk has, none besides, and of shapes and dtypes that belong together.

    Raises:
        ChunkFileError: they are not.
    """
    layers = int(metadata["layers"])
    # Counted first: a forged number of layers must not become a list of names.
    last = [SENSITIVITY] if SENSITIVITY in entries else []
    counted = layers if len(entries) == 2 * layers + len(TOKEN_TENSORS) + len(last) else 0
    names = [name for layer in range(counted) for name in layer_names(layer)]
    if list(entries) != [*TOKEN_TENSORS, *names, *last] or layers < 1:
        raise ChunkFileError(f"its tensors are not those of {layers} layers")
    tokens = entries["tokens"].shape[:1]
    for name, entry in entries.items():
        if name in TOKEN_TENSORS:
            fits = entry.dtype is torch.int32 and len(entry.shape) == 1
            fits = fits and entry.shape[0] <= MAX_TOKENS
        elif name == SENSITIVITY:
            fits = entry.dtype is torch.uint8 and entry.shape == (layers, *tokens)
        else:
            fits = len(entry.shape) == 3 and entry.shape[:1] == tokens
            fits = fits and entry.dtype is not torch.int32
            fits = fits and dtype_name(entry.dtype) == metadata["dtype"]
        if not fits:
            raise ChunkFileError(f"its tensor {name} does not fit the header")
