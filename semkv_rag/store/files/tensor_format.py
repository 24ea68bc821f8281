"""What writing and reading of files of tensors have in common; docs/store.md is the specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from semkv_rag.errors import StoreError

# The header checksum stands at a fixed place, so that it covers every byte behind it as it stands.
PREFIX: Final = b'{"__metadata__":{"xxh3":"'
DIGITS: Final = 16
TAIL: Final = len(PREFIX) + DIGITS
ALIGNMENT: Final = 64

SAFETENSORS_NAMES: Final = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}


@dataclass(frozen=True, slots=True)
class FileFormat:
    """One kind of file of tensors.

    Attributes:
        name: as it stands in the header.
        version: of a file that is written; the newest that can be read.
        noun: what a person calls such a file.
        error: what is raised about it.
    """

    name: str
    version: int
    noun: str
    error: type[StoreError]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype that a file can hold.

    Raises:
        StoreError: it cannot hold it.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in SAFETENSORS_NAMES:
        raise StoreError(f"a file of the store cannot hold {name}")
    return name
