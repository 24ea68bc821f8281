"""Disk space that is kept for taking away: SQLite must write before it can delete.

A file beside the index. On a full disk it is removed before rows are, and made again once there is
room: when the files of the removed chunks are gone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from semkv_rag.store.files.beneath import open_file

RESERVE_BYTES: Final = 8 << 20
"""More than a transaction that takes away 64 chunks writes, wherever in the index their rows are."""


_LEAST_BYTES: Final = 64 << 10


class Reserve:
    """The reserve of one SQLite database."""

    def __init__(self, database: Path) -> None:
        self._path = database.with_name(database.name + ".reserve")

    def make(self) -> None:
        """Make it, or as much of it as there is room for."""
        try:
            handle = open_file(self._path, os.O_WRONLY | os.O_CREAT)
        except OSError:
            return
        try:
            _grow(handle)
        finally:
            os.close(handle)

    def drop(self) -> bool:
        """Give its space back; False when there is none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def is_needed(self) -> bool:
        """Whether the disk is so full that SQLite may have failed for it."""
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < RESERVE_BYTES


def _grow(handle: int) -> None:
    """Have the disk keep the whole reserve for a file, or a half, a quarter and so on."""
    before = os.fstat(handle).st_size
    size = RESERVE_BYTES
    while size > max(before, _LEAST_BYTES):
        try:
            os.posix_fallocate(handle, 0, size)
        except OSError:
            os.ftruncate(handle, before)
            size //= 2
        else:
            return
