"""Where the files of chunks and states stand under the store's root, and how they are found again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from blake3 import blake3

from semkv_rag.config import check_namespace
from semkv_rag.errors import StoreError
from semkv_rag.store.tensor_file import TEMPORARY_SUFFIX

CHUNKS_FOLDER = "chunks"
STATES_FOLDER = "states"
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
    folder = _folder(root / CHUNKS_FOLDER, model, namespace, chunk_id)
    return folder / f"{chunk_id}.r{rank}{_SUFFIX}"


def state_path(root: Path, model: str, namespace: str, state_id: str) -> Path:
    """`states/<model>/<namespace digest>/<id's first two>/<id>.safetensors`.

    Raises:
        StoreError: the model or the id could lead out of the store.
        OptionError: the namespace cannot be one.
    """
    folder = _folder(root / STATES_FOLDER, model, namespace, state_id)
    return folder / f"{state_id}{_SUFFIX}"


def chunk_files(root: Path) -> Iterator[Path]:
    """Every chunk file under the root, of any model, namespace and rank."""
    return (root / CHUNKS_FOLDER).glob(f"*/*/*/[!.]*{_SUFFIX}")


def state_files(root: Path) -> Iterator[Path]:
    """Every state file under the root, of any model and namespace."""
    return (root / STATES_FOLDER).glob(f"*/*/*/[!.]*{_SUFFIX}")


def temporary_files(root: Path) -> Iterator[Path]:
    """What writers write now, or left behind when they were killed."""
    for folder in (CHUNKS_FOLDER, STATES_FOLDER):
        yield from (root / folder).glob(f"*/*/*/.*{_SUFFIX}.*{TEMPORARY_SUFFIX}")


def identity(path: Path) -> Identity | None:
    """The file's identity, or None when there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def _folder(top: Path, model: str, namespace: str, id_: str) -> Path:
    for name in (model, id_):
        if not _PLAIN_NAME.fullmatch(name):
            raise StoreError(f"{name!r} cannot be a model's fingerprint or an id")
    digest = blake3(check_namespace(namespace).encode()).hexdigest(8)
    return top / model[:16] / digest / id_[:2]
