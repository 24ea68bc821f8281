"""The local folder in front of an object store: bounded, and shared by processes.

Its files stand as those of a folder's store do, so the same code reads and checks them. What came and
what went is kept in one small file, `cache.bytes`, which processes change under a lock. It may say that
more is there than is, where several were at a file at once or one was killed, and never less; the next
clearing puts it right. The file that was used longest ago goes first.

Nobody who waits for KV waits for room: from 90 % on a thread clears down to 80 %, and what comes to a
full cache in that moment is kept in memory until it was read.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from semkv_rag.store.files.beneath import (
    folder_of,
    make_folder,
    open_file,
    remove_if_possible,
    status,
)
from semkv_rag.store.files.paths import chunk_files, state_files, temporary_files
from semkv_rag.store.files.tensor_writer import TEMPORARY_SUFFIX, lock_abandoned

HIGH: Final = 0.9
LOW: Final = 0.8
USED_AGAIN_S: Final = 60.0
"""A use is written down so often: each time the file has another time of change, and is another one to
what remembers which files hold numbers only."""
ABANDONED_S: Final = 3600.0

_COUNT: Final = "cache.bytes"
_CLEARING: Final = "cache.clearing"


@dataclass(frozen=True, slots=True)
class NewFile:
    """Where a file that is fetched is written.

    Attributes:
        descriptor: of a file of its size, for reading and writing.
        path: where it goes in the end; None where it is kept in memory only.
        temporary: its name until then.
    """

    descriptor: int
    path: Path | None = None
    temporary: str = ""


class LocalCache:
    """The files under a folder; safe for threads and processes.

    Nothing here raises for a disk that is full or fails: then files are not kept.

    Args:
        root: the folder; made when something is written.
        max_bytes: what its files may take.
    """

    def __init__(self, root: Path, max_bytes: int) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._clearing: threading.Thread | None = None

    @property
    def used_bytes(self) -> int:
        """What its files are counted to take."""
        with suppress(OSError), self._count() as file:
            return _used(file)
        return 0

    def new_file(self, path: Path, size: int) -> NewFile:
        """A file to be fetched; `keep` or `give_up` ends it."""
        used, new = 0, None
        with suppress(OSError), self._count() as file:
            # Counted and made in one: whoever counts anew sees both or none.
            used = _used(file) + size
            if used <= self._max_bytes:
                new = self._on_disk(path, size)
                _add(file, size)
        if used > self._max_bytes * HIGH:
            self._clear_behind()
        return new or in_memory(size)

    def keep(self, new: NewFile) -> None:
        """All of a file is there: others may find it from now on."""
        if new.path is None:
            return
        try:
            with folder_of(new.path) as folder:
                # Not renamed: where another process was first, its file stays.
                os.link(new.temporary, new.path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.unlink(new.temporary, dir_fd=folder)
        except OSError:
            self.give_up(new)

    def give_up(self, new: NewFile) -> None:
        """Remove what there is of a file that did not come."""
        if new.path is not None:
            self._remove(new.path.with_name(new.temporary))

    def count_arrival(self, size: int) -> None:
        """Count bytes that came to the folder by another way, and remove files where it is too full."""
        used = 0
        with suppress(OSError), self._count() as file:
            _add(file, size)
            used = _used(file)
        if used > self._max_bytes:
            self.clear()

    def used(self, descriptor: int) -> None:
        """A file was used now."""
        with suppress(OSError):
            found = os.fstat(descriptor)
            if time.time() - max(found.st_atime, found.st_mtime) > USED_AGAIN_S:
                os.utime(descriptor, ns=(time.time_ns(), found.st_mtime_ns))

    def drop(self, path: Path) -> None:
        """Remove a file, where it is."""
        self._remove(path)

    def clear(self) -> None:
        """Remove files until less than 80 % is taken, where another process does not do so already."""
        with suppress(OSError), self._locked(_CLEARING, wait=False):
            with self._count() as file:
                before, _ = _numbers(file)
            self._remove_abandoned()
            found: dict[int, tuple[float, int, Path]] = {}
            # A file that gets its name meanwhile is seen twice, rather than not at all, and counts once.
            names = (temporary_files(self._root), chunk_files(self._root), state_files(self._root))
            for path in chain(*names):
                if (seen := status(path)) is not None:
                    used_at = max(seen.st_atime, seen.st_mtime)
                    found[seen.st_ino] = used_at, seen.st_size, path
            left = sum(size for _, size, _ in found.values())
            for _, size, path in sorted(found.values()):
                if left <= self._max_bytes * LOW:
                    break
                if not path.name.endswith(TEMPORARY_SUFFIX):
                    remove_if_possible(path)
                    left -= size
            with self._count() as file:
                # What came meanwhile stays counted; what went meanwhile may be, until the next time.
                came, _ = _numbers(file)
                _put_numbers(file, left + came - before, 0)

    def _remove(self, path: Path) -> None:
        """Remove a file, and count what went: once, whoever else is at it."""
        with suppress(OSError), folder_of(path) as folder:
            size = os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_size
            os.unlink(path.name, dir_fd=folder)
            with self._count() as file:
                came, went = _numbers(file)
                _put_numbers(file, came, went + size)

    def _clear_behind(self) -> None:
        if self._clearing is None or not self._clearing.is_alive():
            self._clearing = threading.Thread(target=self.clear, name="semkv-cache", daemon=True)
            self._clearing.start()

    def _on_disk(self, path: Path, size: int) -> NewFile:
        with folder_of(path, make=True, durable=False) as folder:
            temporary = f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o666, dir_fd=folder)
            try:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _allocate(descriptor, size)
            except BaseException:
                os.close(descriptor)
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        return NewFile(descriptor, path, temporary)

    def _remove_abandoned(self) -> None:
        """Temporary files of processes that were killed."""
        for path in temporary_files(self._root):
            seen = status(path)
            if seen is None or time.time() - seen.st_mtime < ABANDONED_S:
                continue
            with suppress(OSError):
                handle = open_file(path, os.O_RDWR)
                try:
                    if lock_abandoned(handle):
                        remove_if_possible(path)
                finally:
                    os.close(handle)

    @contextmanager
    def _count(self) -> Iterator[int]:
        """The file with the number of bytes, locked."""
        with self._locked(_COUNT) as file:
            yield file

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[int]:
        if not self._root.is_dir():
            make_folder(self._root, mode=0o700)
        file = open_file(self._root / name, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            yield file
        finally:
            os.close(file)


def in_memory(size: int) -> NewFile:
    """A file that is gone when it is closed."""
    descriptor = os.memfd_create("semkv")
    os.ftruncate(descriptor, size)
    return NewFile(descriptor)


def _allocate(descriptor: int, size: int) -> None:
    """Have the disk say now whether it has room."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(descriptor, size)


def _numbers(file: int) -> tuple[int, int]:
    """What came and what went, in bytes."""
    parts = os.pread(file, 64, 0).split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return 0, 0
    return int(parts[0]), int(parts[1])


def _put_numbers(file: int, came: int, went: int) -> None:
    text = f"{came} {went}".encode()
    os.pwrite(file, text, 0)
    os.ftruncate(file, len(text))


def _used(file: int) -> int:
    came, went = _numbers(file)
    return max(0, came - went)


def _add(file: int, size: int) -> None:
    came, went = _numbers(file)
    _put_numbers(file, came + size, went)
