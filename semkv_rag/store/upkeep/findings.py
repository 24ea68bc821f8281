"""One run over a store: what it looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Final, TypeVar

from sqlalchemy import Connection

from semkv_rag.errors import SemKVError, StoreVersionError
from semkv_rag.store.files.beneath import keep
from semkv_rag.store.files.header import ChunkHeader
from semkv_rag.store.files.paths import id_in_name, identity
from semkv_rag.store.files.state_file import StateHeader
from semkv_rag.store.gone import BATCH, GoneFile, promised, unlink
from semkv_rag.store.index import chunks, feed
from semkv_rag.store.index.database import Database
from semkv_rag.store.records import Problem, VerifyReport
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents

INDEX: Final = "index"
"""The place of a finding that is about no file."""


class BrokenError(Exception):
    """A promise is not kept: which of its files, and why."""

    def __init__(self, text: object, rank: int = 0) -> None:
        super().__init__(str(text))
        self.rank = rank


Header = TypeVar("Header", ChunkHeader, StateHeader)
Result = TypeVar("Result")


class Verification:
    """What all checks of a run share.

    Attributes:
        chunks, states, bytes: that were found whole.
        problems: promises of the index that are not kept.
        notices: what harms nobody.
    """

    def __init__(
        self,
        database: Database,
        contents: Contents,
        stored_states: StoredStates,
        *,
        repair: bool,
        tensors: bool,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._database = database
        self._contents = contents
        self._states = stored_states
        self._root = contents.root
        self._repair = repair
        self._tensors = tensors
        self._progress = progress
        self._dropped: set[str] = set()
        self.chunks = 0
        self.states = 0
        self.bytes = 0
        self.problems: list[Problem] = []
        self.notices: list[Problem] = []

    def report(self) -> VerifyReport:
        """What the run has found so far."""
        return VerifyReport(
            chunks=self.chunks,
            bytes=self.bytes,
            problems=tuple(self.problems),
            notices=tuple(self.notices),
            repaired=self._repair,
            states=self.states,
        )

    def check_feed(self) -> None:
        """The numbers of the change feed: without them nothing can be added or removed."""

        def check(connection: Connection) -> str | None:
            fault = feed.fault(connection)
            if fault and self._repair:
                feed.restore(connection)
            return fault

        if fault := self._locked(check):
            self._problem("damaged", None, fault)

    def _take_in(self, path: Path) -> None:
        """Say that a file is not promised, and make it ready for that."""
        self._notice("orphan", path, "sound, and not in the index")
        if self._repair:
            with suppress(FileNotFoundError):  # it went meanwhile, and will not be promised
                keep(path)

    def _unknown(self, paths: Iterable[Path]) -> Iterable[list[Path]]:
        """Those of the files that the index does not promise; a chunk's files stand in one list."""
        for _, together in groupby(paths, key=lambda path: path.parent):
            by_id: dict[str | None, list[Path]] = {}
            for path in together:
                by_id.setdefault(id_in_name(path), []).append(path)
            for ids in chunks.pieces(by_id, BATCH):
                with self._database.scanning() as connection:
                    kept = promised(connection, self._root, [id_ for id_ in ids if id_])
                if unknown := [path for id_ in ids for path in by_id[id_] if path not in kept]:
                    yield unknown

    def _locked(self, operation: Callable[[Connection], Result]) -> Result:
        """What `operation` sees is not changed by others meanwhile, when we may lock them out."""
        if not self._database.read_only:
            return self._database.freeing(operation)
        with self._database.scanning() as connection:
            return operation(connection)

    def _checked(self, path: Path, read: Callable[[Path], Header]) -> Header | None:
        """The header of a file that no row promises, when it is sound."""
        seen = identity(path)
        if seen is None:
            return None
        try:
            return read(path)
        except StoreVersionError as error:
            self._notice("orphan", path, str(error))
        except SemKVError as error:
            self._notice("debris", path, str(error))
            # What the system cannot read now may be sound.
            if self._repair and not isinstance(error.__cause__, OSError | MemoryError):
                gone = GoneFile(id_in_name(path) or "", path, seen, self._contents.files)
                unlink(self._database, self._root, [gone])
        return None

    def _problem(self, kind: str, path: Path | None, text: str) -> None:
        self.problems.append(self._finding(kind, path, text))

    def _notice(self, kind: str, path: Path | None, text: str) -> None:
        self.notices.append(self._finding(kind, path, text))

    def _finding(self, kind: str, path: Path | None, text: str) -> Problem:
        place = INDEX if path is None else str(path.relative_to(self._root))
        return Problem(kind, _printable(place), _printable(text))


def _printable(text: str) -> str:
    """Names and texts that somebody else chose may hold what commands a terminal."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
