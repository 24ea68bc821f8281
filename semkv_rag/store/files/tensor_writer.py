"""Files of tensors are written whole or not at all, and synced."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from torch import Tensor
from xxhash import xxh3_64_hexdigest

from semkv_rag.store.files.beneath import folder_of
from semkv_rag.store.files.finite import raw_bytes
from semkv_rag.store.files.tensor_format import (
    ALIGNMENT,
    DIGITS,
    PREFIX,
    SAFETENSORS_NAMES,
    TAIL,
    FileFormat,
    dtype_name,
)

TEMPORARY_SUFFIX: Final = ".tmp"


def write_tensors(
    path: Path,
    file_format: FileFormat,
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
) -> int:
    """Write a file so that it is there whole or not at all; its size in bytes.

    Written under a temporary name in the same folder, synced, renamed, and the folder synced: once
    this returns the file survives a power cut. A killed writer leaves at most a temporary file,
    which `KVStore.verify` takes away; a live one holds a lock on it. Folders are made as needed.

    Args:
        path: where it goes; a file there is replaced, and so is a link.
        metadata: what the file says of itself.
        tensors: contiguous CPU tensors by name, in the order in which they follow.

    Raises:
        OSError: the file could not be written (disk full, a folder of the store that is a link);
            nothing of it is left.
    """
    preamble = _encode(file_format, metadata, tensors)
    with folder_of(path, make=True) as folder:
        temporary, file = _temporary_file(path.name, folder)
        try:
            with file:
                file.write(preamble)
                for tensor in tensors.values():
                    file.write(raw_bytes(tensor))
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
                os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
    return size


def lock_abandoned(handle: int) -> bool:
    """Lock an open temporary file, so that it can be removed; False when its writer is alive."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also of a file system without locks: nobody knows
        return False
    return True


def _encode(
    file_format: FileFormat, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> bytes:
    """The file's bytes in front of its data section: length prefix and JSON, padded."""
    entries: dict[str, Any] = {}
    checksums: dict[str, str] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        checksums[f"xxh3:{name}"] = xxh3_64_hexdigest(raw_bytes(tensor))
        offset = end
    about = {
        "xxh3": "0" * DIGITS,
        "format": file_format.name,
        "format_version": str(file_format.version),
        **metadata,
        **checksums,
    }
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    tail = text[TAIL:] + b" " * (-(8 + len(text)) % ALIGNMENT)
    length = (TAIL + len(tail)).to_bytes(8, "little")
    return length + PREFIX + xxh3_64_hexdigest(tail).encode() + tail


def _temporary_file(name: str, folder: int) -> tuple[str, BinaryIO]:
    """A new file that nobody takes for abandoned while it is open."""
    while True:
        temporary = f".{name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb")  # noqa: PTH123, SIM115
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # somebody took it away between making and locking it
