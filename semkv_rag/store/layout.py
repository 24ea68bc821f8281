"""Where chunk files stand under the store's root, and how they are found again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from semkv_rag.config import check_namespace
from semkv_rag.errors import StoreError
from semkv_rag.store.chunk_file import TEMPORARY_SUFFIX

CHUNKS_FOLDER = "chunks"
_SUFFIX = ".safetensors"
_PLAIN_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]*")

Identity: TypeAlias = tuple[int, int, int]
"""Device, inode and modification time: equal when a file is still the one that was looked at."""


def chunk_path(root: Path, model: str, namespace: str, chunk_id: str, rank: int) -> Path:
    """`chunks/<model>/<namespace digest>/<id's first two>/<id>.r<rank>.safetensors`.

    Raises:
        StoreError: the model or the id could lead out of the store.
        OptionError: the namespace cannot be one.
    """
    for name in (model, chunk_id):
        if not _PLAIN_NAME.fullmatch(name):
            raise StoreError(f"{name!r} cannot be a model's fingerprint or a chunk's id")
    digest = blake3(check_namespace(namespace).encode()).hexdigest(8)
    folder = root / CHUNKS_FOLDER / model[:16] / digest / chunk_id[:2]
    return folder / f"{chunk_id}.r{rank}{_SUFFIX}"


def chunk_files(root: Path) -> Iterator[Path]:
    """Every chunk file under the root, of any model, namespace and rank."""
    return (root / CHUNKS_FOLDER).glob(f"*/*/*/[!.]*{_SUFFIX}")


def temporary_files(root: Path) -> Iterator[Path]:
    """What writers write now, or left behind when they were killed."""
    return (root / CHUNKS_FOLDER).glob(f"*/*/*/.*{_SUFFIX}.*{TEMPORARY_SUFFIX}")


def identity(path: Path) -> Identity | None:
    """The file's identity, or None when there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns
