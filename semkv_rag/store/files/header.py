"""What a chunk file says of itself: a `ChunkHeader`, and the metadata and tensors it stands in.

Pure: no file is touched here. docs/store.md is the specification.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from blake3 import blake3

from semkv_rag.config import check_namespace
from semkv_rag.errors import ChunkFileError, OptionError, StoreVersionError
from semkv_rag.reuse.tokens import TokenArray, token_array
from semkv_rag.store.codecs import PLAIN, Codec, codec_named
from semkv_rag.store.codecs.codec import HeadShape
from semkv_rag.store.files.tensor_file import TensorEntry
from semkv_rag.store.files.tensor_format import SAFETENSORS_NAMES, FileFormat

FORMAT: Final = FileFormat("semkv.chunk", 3, "chunk file", ChunkFileError)
PLAIN_FORMAT: Final = replace(FORMAT, version=2)
"""What a plain chunk is written as: versions of semkv-rag without codecs read it, too."""
KINDS: Final = ("document", "head", "prompt")
"""A prompt prefix is a `head` in stored files and in the index, which stay readable."""
TOKEN_TENSORS: Final = ("tokens", "context")
SENSITIVITY: Final = "sensitivity"
"""The tensor that a chunk may have besides: `semkv_rag.blend.sensitivity`."""
MAX_RANKS: Final = 1024
MAX_TOKENS: Final = 1 << 24
"""The most tokens of a chunk, and of its context. They are read whole when its file is opened."""
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
        codec: how they stand in it; `dtype` is what they are decoded to.
        rank, world_size: the rank whose KV heads and layers these are, of how many.
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
    codec: str = PLAIN

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


def layer_names(layer: int, codec: Codec) -> dict[str, str]:
    """The names of a layer's tensors in a file, by what the codec calls them."""
    return {name: f"{layer:04d}.{name}" for name in codec.names}


def format_of(header: ChunkHeader) -> FileFormat:
    """As what a chunk is written."""
    return PLAIN_FORMAT if header.codec == PLAIN else FORMAT


def metadata_of(header: ChunkHeader) -> dict[str, str]:
    """The header as it stands in the file, but for the token tensors."""
    return {
        **({} if header.codec == PLAIN else {"codec": header.codec}),
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
            codec=metadata.get("codec", PLAIN),
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


def codec_of(metadata: Mapping[str, str]) -> Codec:
    """The codec of a file.

    Raises:
        ChunkFileError: the format is not one with codecs, or a plain chunk's is.
        StoreVersionError: this version knows none of that name.
    """
    name = metadata.get("codec", PLAIN)
    if (name == PLAIN) != (int(metadata["format_version"]) <= PLAIN_FORMAT.version):
        raise ChunkFileError(f"its format does not go with codec {name[:32]!r}")
    try:
        return codec_named(name)
    except OptionError as error:
        raise StoreVersionError(
            f"a chunk file was written by codec {name[:32]!r}, which this version does not know"
        ) from error


def dtype_of(name: str) -> torch.dtype:
    """The dtype of K and V.

    Raises:
        ChunkFileError: it is none that they have.
    """
    if name not in SAFETENSORS_NAMES or name == "int32":  # tokens are that, and no KV is
        raise ChunkFileError(f"its dtype is {name[:32]!r}")
    found: torch.dtype = getattr(torch, name)
    return found


def check_entries(
    metadata: Mapping[str, str], entries: Mapping[str, TensorEntry]
) -> list[tuple[HeadShape, HeadShape]]:
    """Every tensor that a chunk has, none besides, and of shapes and dtypes that belong together.

    Returns:
        `(kv_heads, head_dim)` of K and of V, by layer.

    Raises:
        ChunkFileError: they are not.
    """
    layers, codec, dtype = int(metadata["layers"]), codec_of(metadata), dtype_of(metadata["dtype"])
    # Counted first: a forged number of layers must not become a list of names.
    last = [SENSITIVITY] if SENSITIVITY in entries else []
    count = len(codec.names) * layers + len(TOKEN_TENSORS) + len(last)
    counted = layers if len(entries) == count else 0
    own = [layer_names(layer, codec) for layer in range(counted)]
    names = [name for one in own for name in one.values()]
    if list(entries) != [*TOKEN_TENSORS, *names, *last] or layers < 1:
        raise ChunkFileError(f"its tensors are not those of {layers} layers")
    for name in TOKEN_TENSORS:
        entry = entries[name]
        if not (entry.dtype is torch.int32 and len(entry.shape) == 1):
            raise ChunkFileError(f"its tensor {name} does not fit the header")
        if entry.shape[0] > MAX_TOKENS:
            raise ChunkFileError(f"its tensor {name} does not fit the header")
    tokens = entries["tokens"].shape[0]
    shapes = []
    for one in own:
        try:
            pair = codec.shapes({part: entries[name].shape for part, name in one.items()})
            layout = codec.layout(tokens, *pair, dtype)
        except ValueError as error:
            raise ChunkFileError(f"its tensors {min(one.values())}, …: {error}") from error
        for part, name in one.items():
            if (entries[name].dtype, entries[name].shape) != layout[part]:
                raise ChunkFileError(f"its tensor {name} does not fit the header")
        shapes.append(pair)
    if last and (entries[SENSITIVITY].dtype, entries[SENSITIVITY].shape) != (
        torch.uint8,
        (layers, tokens),
    ):
        raise ChunkFileError(f"its tensor {SENSITIVITY} does not fit the header")
    return shapes
