"""A stand between the store and the system: calls that fail, a process that dies, power that goes.

**Faults.** The n-th call that changes the disk raises an OSError, or the process dies there: that call
and all later ones have no effect.

**Power loss.** All calls are written down, and `Model` says what a disk may hold once power was lost
behind any of them. The model is POSIX's, and harsher than most file systems:

* a file's bytes are on the disk once the file was synced; before that the file may be empty, as long as
  it should be but torn or zero, or whole;
* a name that was made, replaced or removed is so on the disk once its folder was synced; before that,
  each change is there or not, whatever became of those before it, except that a rename is one change;
* a folder that is not on the disk takes with it all that is in it.

SQLite writes its files by itself. For those the model trusts SQLite's own word: a commit under
`synchronous=FULL` is on the disk, one under `NORMAL` may be lost. The files as they stood after each
commit are kept, and which of the two it was is asked of the connection.

Only calls through Python's `os` and `open` are seen. `Model.tree` must equal the folder after a run, or
the store changes files in a way that this module does not know: tests check that.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from sqlalchemy import Connection, Engine, event

from semkv_rag.store.files import beneath
from semkv_rag.store.index import sqlite

_INDEX = "index.sqlite"


class Died(BaseException):
    """The process was killed in a call that changes the disk."""


@dataclass(frozen=True)
class Call:
    """One call that changes the disk.

    Attributes:
        kind: `create`, `write`, `sync`, `rename`, `link`, `unlink`, `mkdir`; `commit` of the index;
            `note` is no call: a test's own remark.
        path: of what; for `rename` and `link`, the new name.
        source: for `rename` and `link`, the old name.
        data: for `write`, the bytes, from `offset` on.
        index: for `commit` in SQLite, the index's files by name.
        durable: for `commit`, whether it is on the disk.
        note: for `note`.
    """

    kind: str
    path: Path
    source: Path | None = None
    offset: int = 0
    data: bytes = b""
    index: Mapping[str, bytes] = field(default_factory=dict)
    durable: bool = True
    note: Any = None


class Disk:
    """Watches the calls on files under `top`, and has one of them fail.

    Attributes:
        calls: those that were made, in order.
        count: how many calls came that could have failed, since `fail` or `die`.
    """

    def __init__(self, top: Path) -> None:
        self.top = top
        self.calls: list[Call] = []
        self.count = 0
        self._at: int | None = None
        self._error = 0
        self._dead = False

    @contextmanager
    def fail(self, at: int) -> Iterator[None]:
        """In the call number `at`, from 0, the disk is full; a write gets half way."""
        self.count, self._at, self._error = 0, at, errno.ENOSPC
        yield
        self._at = None

    @contextmanager
    def die(self, at: int) -> Iterator[None]:
        """The process dies in call number `at`, from 0; another one goes on in the end."""
        self.count, self._at, self._error = 0, at, 0
        try:
            yield
        except Died:
            pass
        finally:
            self._at, self._dead = None, False
            beneath._kept.clear()  # the other process does not know what this one synced

    def note(self, remark: object) -> None:
        """Write a remark between the calls."""
        self.calls.append(Call("note", self.top, note=remark))

    def before(self) -> bool:
        """Ask for leave to change the disk; False when there is nobody any more who could."""
        if self._dead:
            return False
        self.count += 1
        if self._at is not None and self.count > self._at:
            at, self._at = self._at, None
            if self._error:
                raise OSError(self._error, os.strerror(self._error), f"call {at}")
            self._dead = True
            raise Died
        return True

    def sees(self, path: Path) -> bool:
        return path.is_relative_to(self.top) and not path.name.startswith(_INDEX)


class _Raw(io.FileIO):
    """An open file whose writes go through the disk."""

    def __init__(self, disk: Disk, number: int) -> None:
        super().__init__(number, "wb")
        self._disk = disk

    def write(self, data: Any) -> int:
        written = bytes(data)
        try:
            if not self._disk.before():
                return len(written)
        except OSError:
            self._put(written[: len(written) // 2])
            raise
        return self._put(written)

    def _put(self, data: bytes) -> int:
        offset = self.tell()
        count = super().write(data)
        assert count == len(data)
        self._disk.calls.append(Call("write", _path_of(self.fileno()), offset=offset, data=data))
        return count


@contextmanager
def watched(top: Path) -> Iterator[Disk]:
    """A disk that watches the files under `top`, and the commits of all indexes."""
    disk = Disk(top)
    with pytest.MonkeyPatch.context() as patch:
        _watch_files(disk, patch)
        _watch_index(disk, patch)

        def on_commit(_connection: Connection) -> None:
            if not disk.before():
                raise Died

        event.listen(Engine, "commit", on_commit)
        try:
            yield disk
        finally:
            event.remove(Engine, "commit", on_commit)


def _path_of(number: int) -> Path:
    """Of an open file or folder."""
    return Path(f"/proc/self/fd/{number}").readlink()


def _path_in(folder: int | None, path: Any) -> Path:
    given = Path(os.fsdecode(path))
    return given if folder is None or given.is_absolute() else _path_of(folder) / given


def _watch_files(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    real_open, real_os_open = io.open, os.open

    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = _path_in(dir_fd, path)
        if not disk.sees(where) or not flags & (os.O_CREAT | os.O_TRUNC) or where.exists():
            assert not (disk.sees(where) and flags & os.O_TRUNC), "truncation is not modelled"
            return real_os_open(path, flags, mode, dir_fd=dir_fd)
        if not disk.before():
            raise Died
        number = real_os_open(path, flags, mode, dir_fd=dir_fd)
        disk.calls.append(Call("create", where))
        return number

    def open_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wxa+") or not disk.sees(
            _path_of(file) if isinstance(file, int) else Path(os.fsdecode(file))
        ):
            return real_open(file, mode, buffering, *rest, **named)
        assert set(mode) <= set("wxbt"), f"{mode} is not modelled"
        if not isinstance(file, int):
            file = os_open(
                file, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if "x" in mode else 0), 0o666
            )
        buffered = io.BufferedWriter(_Raw(disk, file))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **named)

    def watch_two(name: str, kind: str) -> None:
        real = getattr(os, name)

        def call(source: Any, path: Any, **folders: Any) -> None:
            to = _path_in(folders.get("dst_dir_fd"), path)
            if not disk.sees(to):
                real(source, path, **folders)
            elif disk.before():
                real(source, path, **folders)
                disk.calls.append(Call(kind, to, _path_in(folders.get("src_dir_fd"), source)))

        patch.setattr(os, name, call)

    def watch_one(name: str, kind: str) -> None:
        real = getattr(os, name)

        def call(path: Any, *mode: Any, dir_fd: int | None = None) -> None:
            where = _path_in(dir_fd, path)
            if not disk.sees(where):
                real(path, *mode, dir_fd=dir_fd)
            elif disk.before():
                real(path, *mode, dir_fd=dir_fd)
                disk.calls.append(Call(kind, where))

        patch.setattr(os, name, call)

    def watch_sync(name: str) -> None:
        real = getattr(os, name)

        def call(file: Any) -> None:
            path = _path_of(file if isinstance(file, int) else file.fileno())
            if not disk.sees(path):
                real(file)
            elif disk.before():
                real(file)
                disk.calls.append(Call("sync", path))

        patch.setattr(os, name, call)

    for name, kind in (("replace", "rename"), ("rename", "rename"), ("link", "link")):
        watch_two(name, kind)
    for name, kind in (("unlink", "unlink"), ("remove", "unlink"), ("mkdir", "mkdir")):
        watch_one(name, kind)
    for name in ("fsync", "fdatasync"):
        watch_sync(name)
    patch.setattr(os, "open", os_open)
    patch.setattr(io, "open", open_file)
    patch.setattr(builtins, "open", open_file)


def _watch_index(disk: Disk, patch: pytest.MonkeyPatch) -> None:
    full = 2

    def commit(connection: sqlite._Connection) -> None:
        durable = connection.execute("PRAGMA synchronous").fetchone()[0] >= full
        super(sqlite._Connection, connection).commit()
        file = Path(connection.execute("PRAGMA database_list").fetchone()[2])
        found = {name: file.with_name(name) for name in (_INDEX, f"{_INDEX}-wal")}
        files = {name: path.read_bytes() for name, path in found.items() if path.exists()}
        disk.calls.append(Call("commit", file, index=files, durable=durable))

    patch.setattr(sqlite._Connection, "commit", commit, raising=False)


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None


@dataclass(eq=False)
class _Folder:
    now: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    pending: list[dict[str, _Node | None]] = field(default_factory=list)

    def change(self, changes: dict[str, _Node | None]) -> None:
        _apply(self.now, changes)
        self.pending.append(changes)


_Node: TypeAlias = _File | _Folder
Loss: TypeAlias = Literal["all", "nothing"] | random.Random
"""What a power loss takes of what was not synced; a Random draws it."""


class Model:
    """What the disk holds after some calls, and what of it a power loss leaves.

    Args:
        top: the folder that `Disk` watched. It is on the disk, and was empty.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._tree = _Folder()
        self._index: Mapping[str, bytes] = {}
        self._durable_index: Mapping[str, bytes] = {}
        self._index_folder: Path | None = None

    def add(self, call: Call) -> None:
        """One call more."""
        if call.kind == "commit":
            self._index, self._index_folder = call.index, call.path.parent
            if call.durable:
                self._durable_index = call.index
        elif call.kind == "sync":
            self._sync(call.path)
        elif call.kind == "write":
            file = self._at(call.path)
            assert isinstance(file, _File)
            file.data[call.offset : call.offset + len(call.data)] = call.data
        elif call.kind != "note":
            self._change_names(call)

    def tree(self) -> dict[str, bytes | None]:
        """What a process sees: each file's bytes by its path, and None for a folder."""
        return dict(_walk(self._tree.now, Path()))

    def lose_power(self, folder: Path, loss: Loss) -> None:
        """Fill an empty folder with what the disk may hold afterwards."""
        _materialise(self._tree, folder, loss)
        if self._index_folder is None:
            return
        place = folder / self._index_folder.relative_to(self._top)
        if place.is_dir():
            for name, data in (self._index if _keeps(loss) else self._durable_index).items():
                (place / name).write_bytes(data)

    def _change_names(self, call: Call) -> None:
        parent, name = self._at(call.path.parent), call.path.name
        assert isinstance(parent, _Folder)
        if call.kind == "mkdir":
            parent.change({name: _Folder()})
        elif call.kind == "create":
            parent.change({name: _File()})
        elif call.kind == "unlink":
            parent.change({name: None})
        else:
            assert call.source is not None
            assert call.source.parent == call.path.parent, "moves between folders are not modelled"
            node = parent.now[call.source.name]
            parent.change(
                {name: node} | ({call.source.name: None} if call.kind == "rename" else {})
            )

    def _sync(self, path: Path) -> None:
        node = self._at(path)
        if isinstance(node, _File):
            node.durable = bytes(node.data)
            return
        for changes in node.pending:
            _apply(node.durable, changes)
        node.pending.clear()

    def _at(self, path: Path) -> _Node:
        node: _Node = self._tree
        for part in path.relative_to(self._top).parts:
            assert isinstance(node, _Folder)
            node = node.now[part]
        return node


def _apply(names: dict[str, _Node], changes: Mapping[str, _Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _keeps(loss: Loss) -> bool:
    return loss == "nothing" if isinstance(loss, str) else loss.random() < 0.5


def _walk(names: Mapping[str, _Node], place: Path) -> Iterator[tuple[str, bytes | None]]:
    for name, node in names.items():
        if isinstance(node, _File):
            yield str(place / name), bytes(node.data)
        else:
            yield str(place / name), None
            yield from _walk(node.now, place / name)


def _materialise(tree: _Folder, folder: Path, loss: Loss) -> None:
    names = dict(tree.durable)
    for changes in tree.pending:
        if _keeps(loss):
            _apply(names, changes)
    for name, node in names.items():
        if isinstance(node, _File):
            (folder / name).write_bytes(_after_loss(node, loss))
        else:
            (folder / name).mkdir()
            _materialise(node, folder / name, loss)


def _after_loss(file: _File, loss: Loss) -> bytes:
    synced = file.durable or b""
    if file.data == file.durable or loss == "all":
        return synced
    if loss == "nothing":
        return bytes(file.data)
    torn = bytes(file.data[: loss.randrange(len(file.data) + 1)])
    return loss.choice([synced, bytes(file.data), torn, bytes(len(file.data))])
