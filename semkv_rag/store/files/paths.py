"""Where the files of chunks and states stand under the store's root, and how they are found again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from blake3 import blake3

from semkv_rag.config import check_namespace
from semkv_rag.errors import SemKVError, StoreError
from semkv_rag.store.files.beneath import (
    CATALOGUE_FOLDER,
    CHUNKS_FOLDER,
    STATES_FOLDER,
    entries,
    linked_folders,
    status,
)
from semkv_rag.store.files.header import MAX_RANKS
from semkv_rag.store.files.tensor_writer import TEMPORARY_SUFFIX
from semkv_rag.store.records import ChunkKey, StateRecord

_SUFFIX = ".safetensors"
_PLAIN_NAME = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z_.-]*")
_FILE_NAME = re.compile(rf"[^.].*{re.escape(_SUFFIX)}", re.DOTALL)
_TEMPORARY_NAME = re.compile(
    rf"\..*{re.escape(_SUFFIX)}\..*{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL
)

Identity: TypeAlias = tuple[int, int, int]
"""Device, inode and modification time: equal when a file is still the one that was looked at."""

ALWAYS: Final[Identity] = (0, 0, 0)
"""An object's, which is asked about only when it is removed."""


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


def window_path(root: Path, model: str, namespace: str) -> Path:
    """`catalogue/<model>/<namespace digest>/v1/windows.safetensors`.

    Raises:
        StoreError: the model could lead out of the store.
        OptionError: the namespace cannot be one.
    """
    return _folder(root / CATALOGUE_FOLDER, model, namespace, "v1") / f"windows{_SUFFIX}"


def chunk_paths(root: Path, key: ChunkKey, ranks: int) -> list[Path]:
    """A promised chunk's files, one for each rank.

    None where the index holds what leads to no file: then somebody else wrote to it.
    """
    if ranks not in range(1, MAX_RANKS + 1):
        return []
    with suppress(SemKVError):
        return [chunk_path(root, key.model, key.namespace, key.id, rank) for rank in range(ranks)]
    return []


def state_paths(root: Path, record: StateRecord | ChunkKey) -> list[Path]:
    """A promised state's file; none where the index holds what leads to no file."""
    with suppress(SemKVError):
        return [state_path(root, record.model, record.namespace, record.id)]
    return []


def chunk_files(root: Path) -> Iterator[Path]:
    """Every chunk file under the root, of any model, namespace and rank, folder by folder."""
    return _named(root, CHUNKS_FOLDER, _FILE_NAME)


def state_files(root: Path) -> Iterator[Path]:
    """Every state file under the root, of any model and namespace, folder by folder."""
    return _named(root, STATES_FOLDER, _FILE_NAME)


def temporary_files(root: Path) -> Iterator[Path]:
    """What writers write now, or left behind when they were killed."""
    for folder in (CHUNKS_FOLDER, STATES_FOLDER, CATALOGUE_FOLDER):
        yield from _named(root, folder, _TEMPORARY_NAME)


def links(root: Path) -> Iterator[Path]:
    """Links where the store's own folders belong."""
    for folder in (CHUNKS_FOLDER, STATES_FOLDER, CATALOGUE_FOLDER):
        yield from linked_folders(root, folder)


def id_in_name(path: Path) -> str | None:
    """The id that a file's name says, or None when it says none."""
    id_ = path.name.split(".")[0]
    return id_ if _PLAIN_NAME.fullmatch(id_) else None


def identity(path: Path) -> Identity | None:
    """The file's identity, of a link that of the link itself; None when there is none."""
    found = status(path)
    return None if found is None else (found.st_dev, found.st_ino, found.st_mtime_ns)


def _named(root: Path, folder: str, name: re.Pattern[str]) -> Iterator[Path]:
    return (path for path in entries(root, folder) if name.fullmatch(path.name))


def _folder(top: Path, model: str, namespace: str, id_: str) -> Path:
    for name in (model, id_):
        if not _PLAIN_NAME.fullmatch(name):
            raise StoreError(f"{name!r} cannot be a model's fingerprint or an id")
    digest = blake3(check_namespace(namespace).encode()).hexdigest(8)
    return top / model[:16] / digest / id_[:2]
