"""What a chunk file says of itself, and the bytes it says it in.

A chunk file is a safetensors file, so its header is an 8-byte length and a JSON text. This module
turns a `ChunkHeader` into those bytes (once per file written) and back (once per file opened, on the
request path). It is pure: no file is touched here. docs/store.md is the specification.

The header is written and read here rather than by the safetensors package for what that package does
not offer: a checksum that is checked before any JSON is parsed, errors that keep their errno, files
with the permissions of the umask, and tensors read into memory of their own instead of a map that
kills the process when somebody truncates the file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from blake3 import blake3
from xxhash import xxh3_64_hexdigest

from semkv_rag.errors import ChunkFileError, StoreVersionError
from semkv_rag.reuse.tokens import TokenArray, token_array

FORMAT: Final = "semkv.chunk"
FORMAT_VERSION: Final = 1
KINDS: Final = ("document", "head", "prompt")
MAX_HEADER_BYTES: Final = 4 << 20
TOKEN_TENSORS: Final = ("tokens", "context")

# The header checksum stands at a fixed place, so that it covers every byte behind it as it stands.
_PREFIX: Final = b'{"__metadata__":{"xxh3":"'
_DIGITS: Final = 16
_TAIL: Final = len(_PREFIX) + _DIGITS
_ALIGNMENT: Final = 64

_SAFETENSORS_NAMES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}
_TORCH_NAMES: Final = {short: name for name, short in _SAFETENSORS_NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class ChunkHeader:
    """Everything the index holds of a chunk, so that it can be rebuilt from the files alone.

    Attributes:
        id: the content address, `chunk_id(model, namespace, context, tokens)`.
        model: fingerprint of the model that computed the KV.
        namespace: the tenant it belongs to.
        kind: `document`, `head` (a prompt's head) or `prompt` (a whole prompt, a donor).
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


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor stands in the file's data section, and its checksum."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    checksum: str


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


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, not copied."""
    if not tensor.nbytes:
        return memoryview(b"")
    return tensor.view(torch.uint8).numpy().data.cast("B")


def encode(header: ChunkHeader, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The file's bytes in front of its data section: length prefix and JSON, padded.

    Args:
        header: what the file says of itself.
        tensors: contiguous CPU tensors by name, in the order in which they follow.
    """
    entries: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _SAFETENSORS_NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        checksums[f"xxh3:{name}"] = xxh3_64_hexdigest(raw_bytes(tensor))
        offset = end
    metadata = {
        "xxh3": "0" * _DIGITS,
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "id": header.id,
        "model": header.model,
        "namespace": header.namespace,
        "kind": header.kind,
        "dtype": header.dtype,
        "layers": str(header.layers),
        "rank": str(header.rank),
        "world_size": str(header.world_size),
        "created_at": repr(header.created_at),
        **checksums,
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    tail = text[_TAIL:] + b" " * (-(8 + len(text)) % _ALIGNMENT)
    length = (_TAIL + len(tail)).to_bytes(8, "little")
    return length + _PREFIX + xxh3_64_hexdigest(tail).encode() + tail


def decode(text: bytes, data_bytes: int) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """The metadata and the tensors of a header's JSON text, checked against each other.

    Args:
        text: the header without its length prefix.
        data_bytes: size of the data section that the file really has.

    Raises:
        ChunkFileError: the text was altered, is no chunk's, or does not fit the data section.
        StoreVersionError: a newer version wrote it.
    """
    if not text.startswith(_PREFIX):
        raise ChunkFileError("its header is not that of a chunk file")
    if xxh3_64_hexdigest(text[_TAIL:]).encode() != text[len(_PREFIX) : _TAIL]:
        raise ChunkFileError("its header was altered: the checksum differs")
    try:
        document = json.loads(text)
        metadata: dict[str, str] = document.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ChunkFileError("its metadata are not text")
        if metadata["format"] != FORMAT:
            raise ChunkFileError(f"its format is {metadata['format']!r}, not {FORMAT!r}")
        if int(metadata["format_version"]) > FORMAT_VERSION:
            raise StoreVersionError(
                f"a chunk file of format {metadata['format_version']} was written by a newer"
                f" version of semkv-rag: this one reads up to {FORMAT_VERSION}"
            )
        entries = {name: _entry(name, value, metadata) for name, value in document.items()}
        _check_layout(entries, metadata, data_bytes)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ChunkFileError(f"its header cannot be understood: {error!r}") from error
    return metadata, entries


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
    if chunk_id(header.model, header.namespace, context, tokens) != header.id:
        raise ChunkFileError("its tokens are not those that its id was made of")
    return header


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype that a chunk file can hold.

    Raises:
        ChunkFileError: it cannot hold it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in _SAFETENSORS_NAMES:
        raise ChunkFileError(f"a chunk file cannot hold {name}")
    return name


def _entry(name: str, value: Mapping[str, Any], metadata: Mapping[str, str]) -> TensorEntry:
    begin, end = value["data_offsets"]
    return TensorEntry(
        dtype=getattr(torch, _TORCH_NAMES[value["dtype"]]),
        shape=tuple(int(size) for size in value["shape"]),
        begin=int(begin),
        end=int(end),
        checksum=metadata[f"xxh3:{name}"],
    )


def _check_layout(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str], data_bytes: int
) -> None:
    """Every tensor a chunk has, none besides, one behind the other, and all of the data section."""
    layers = int(metadata["layers"])
    # Counted first: a forged number of layers must not become a list of names.
    names = range(layers) if len(entries) == 2 * layers + len(TOKEN_TENSORS) else ()
    expected = {name for layer in names for name in layer_names(layer)} | {*TOKEN_TENSORS}
    if entries.keys() != expected or layers < 1:
        raise ChunkFileError(f"its tensors are not those of {layers} layers")
    tokens = entries["tokens"].shape[:1]
    dtype = getattr(torch, metadata["dtype"])
    offset = 0
    for name, entry in entries.items():
        size = entry.dtype.itemsize * math.prod(entry.shape)
        fits = (entry.begin, entry.end) == (offset, offset + size) and min(entry.shape) >= 0
        if name in TOKEN_TENSORS:
            fits = fits and entry.dtype is torch.int32 and len(entry.shape) == 1
        else:
            fits = fits and entry.dtype is dtype and len(entry.shape) == 3
            fits = fits and entry.shape[:1] == tokens
        if not fits:
            raise ChunkFileError(f"its tensor {name} does not fit the header")
        offset = entry.end
    if offset != data_bytes:
        raise ChunkFileError(
            f"it is torn: {data_bytes} bytes of data where its header says {offset}"
        )
