"""Files beneath a store's root, reached without following a symbolic link.

Without this, anybody who can write to the folder could make other users' processes read, write or delete
files elsewhere. The root itself may be reached through links, because the operator chose it. Below the
root each folder is opened relative to the one above it, so that a link that is put there meanwhile is not
followed either.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

CHUNKS_FOLDER: Final = "chunks"
STATES_FOLDER: Final = "states"
CATALOGUE_FOLDER: Final = "catalogue"
_TOPS: Final = (CHUNKS_FOLDER, STATES_FOLDER, CATALOGUE_FOLDER)
_DEPTH: Final = 4
"""Folders between the root and a file: `chunks/<model>/<namespace>/<aa>`."""

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Not blocking: a pipe could take a file's place after it was looked at.
_FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

_kept: Final[set[tuple[Path, int]]] = set()
"""Path and inode of folders whose names this process synced: either alone may be another's later."""
_MOST_KEPT: Final = 10_000


class NotAFileError(OSError):
    """A link, a pipe or something else stands where a file or a folder of the store belongs."""


@contextmanager
def folder_of(path: Path, *, make: bool = False, durable: bool = True) -> Iterator[int]:
    """A handle of the folder that a file is in, for calls with `dir_fd`.

    Args:
        path: a file of a store, as `paths` names them. To another file's folder links are followed.
        make: make the folders that are not there.
        durable: so that they survive a power cut.

    Raises:
        NotAFileError: a folder below the root is a link, or something else.
        OSError: it is not there, or cannot be opened.
    """
    top, names = _split(path)
    if make and not top.is_dir():
        make_folder(top)
    handle = os.open(top, _FOLDER)
    try:
        for depth, name in enumerate(names, start=1):
            is_new = make and _make_inner(handle, name)
            inner = _open_folder(handle, name)
            parent, handle = handle, inner
            try:
                if make and durable:
                    place = top.joinpath(*names[:depth])
                    _keep_name(place, parent, inner, is_new=is_new)
            finally:
                os.close(parent)
        yield handle
    finally:
        os.close(handle)


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file. Never waits for what else may stand there.

    Args:
        flags: how, as for `os.open`.

    Raises:
        NotAFileError: it is something else, or is reached through a link.
        OSError: it is not there, or cannot be opened.
    """
    with folder_of(path) as folder:
        try:
            # Looked at first: opening a device may already do something.
            _require_file(os.stat(path.name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
        try:
            handle = os.open(path.name, flags | _FILE, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotAFileError(errno.ELOOP, "is a symbolic link") from error
            raise
    try:
        _require_file(os.fstat(handle))
    except BaseException:
        os.close(handle)
        raise
    return handle


def keep(path: Path) -> None:
    """Have a file that was found survive a power cut: whoever wrote it may have been killed before.

    Raises:
        OSError: it went, or its disk fails.
    """
    with folder_of(path, make=True) as folder:
        handle = os.open(path.name, os.O_RDONLY | _FILE, dir_fd=folder)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        os.fsync(folder)


def status(path: Path) -> os.stat_result | None:
    """What stands at a place, of a link the link itself; None when nothing can be seen there."""
    try:
        with folder_of(path) as folder:
            return os.stat(path.name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None


def file_bytes(path: Path) -> int | None:
    """A regular file's size; None when there is none."""
    found = status(path)
    return found.st_size if found is not None and stat.S_ISREG(found.st_mode) else None


def remove_if_possible(path: Path) -> None:
    """Remove a file, or a link and not what it points to. What cannot be removed, as a folder, stays:
    `KVStore.verify` names it.
    """
    with suppress(OSError), folder_of(path) as folder:
        os.unlink(path.name, dir_fd=folder)


def entries(root: Path, top: str) -> Iterator[Path]:
    """Whatever stands where the files of chunks, or of states, do."""
    return (path for path, depth, _ in _walk(root, top, _DEPTH) if depth == _DEPTH)


def linked_folders(root: Path, top: str) -> Iterator[Path]:
    """Links where the folders of chunks, or of states, stand: nothing behind them is looked at."""
    return (path for path, _, is_link in _walk(root, top, _DEPTH - 1) if is_link)


def _walk(root: Path, top: str, depth: int) -> Iterator[tuple[Path, int, bool]]:
    """Everything under a folder of the root, how deep it stands, and whether it is a link."""
    try:
        handle = os.open(root, _FOLDER)
    except OSError:
        return
    try:
        found = os.stat(top, dir_fd=handle, follow_symlinks=False)
        yield root / top, 0, stat.S_ISLNK(found.st_mode)
        yield from _below(handle, root / top, 1, depth)
    except FileNotFoundError:
        return
    finally:
        os.close(handle)


def _below(parent: int, path: Path, depth: int, deepest: int) -> Iterator[tuple[Path, int, bool]]:
    try:
        handle = _open_folder(parent, path.name)
    except OSError:
        return  # it is no folder, or went meanwhile
    try:
        with os.scandir(handle) as listed:
            found = [(entry.name, entry.is_symlink()) for entry in listed]
        for name, is_link in found:
            yield path / name, depth, is_link
            if depth < deepest:
                yield from _below(handle, path / name, depth + 1, deepest)
    finally:
        os.close(handle)


def _split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """A store's root and the folders from there to a file; of another file, its folder."""
    names = path.parts[-_DEPTH - 1 : -1]
    if len(names) == _DEPTH and names[0] in _TOPS:
        return path.parents[_DEPTH], names
    return path.parent, ()


def _open_folder(parent: int, name: str) -> int:
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            what = f"is reached through {name}, which is a symbolic link or no folder"
            raise NotAFileError(error.errno, what) from error
        raise


def _require_file(found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise NotAFileError(errno.ELOOP, "is a symbolic link")
    if not stat.S_ISREG(found.st_mode):
        raise NotAFileError(errno.EINVAL, "is not a file")


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Like mkdir -p, and the new names survive a power cut, whoever made them.

    Args:
        mode: of the folder itself, when it is made.

    Raises:
        OSError: it cannot be made.
    """
    if folder.is_dir():
        # Somebody else may have made it who did not sync it yet, or was killed.
        with suppress(OSError):  # in a folder that others made, and that we may not read
            _sync_folder(folder.parent)
        return
    make_folder(folder.parent)
    folder.mkdir(mode, exist_ok=True)
    _sync_folder(folder.parent)


def _make_inner(parent: int, name: str) -> bool:
    """Make a folder; False when there was one."""
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return False
    return True


def _keep_name(path: Path, parent: int, folder: int, *, is_new: bool) -> None:
    """Have a folder's name survive a power cut: once in each process, and when it was made now.

    Whoever made a folder that is there may not have synced it yet, or was killed before.
    """
    key = (path, os.fstat(folder).st_ino)
    if is_new or key not in _kept:
        os.fsync(parent)
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept.add(key)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, _FOLDER)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
