"""Images' features: what the index promises, and the files that it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from semkv_rag.errors import SemKVError, StateFileError
from semkv_rag.store.files.paths import (
    Identity,
    identity,
    state_files,
    state_path,
    state_paths,
)
from semkv_rag.store.files.state_file import StateFile, StateHeader
from semkv_rag.store.index import states
from semkv_rag.store.records import StateRecord
from semkv_rag.store.states import record_of
from semkv_rag.store.upkeep.findings import BrokenError, Verification


class StateChecks(Verification):
    """Verifies the stored features of images."""

    def check_states(self) -> None:
        """Every state's row: its file is there and sound."""
        for record in self._states.records():
            self._check_state(record)
            self.states += 1

    def check_state_files(self) -> None:
        """Every state's file that the index does not promise."""
        for unknown in self._unknown(state_files(self._root)):
            orphans = [path for path in unknown if self._checked(path, self._read_state)]
            for path in orphans:
                self._take_in(path)
            if self._repair:
                self._states.promise(orphans, mending=True)

    def _check_state(self, record: StateRecord) -> None:
        while True:
            paths = state_paths(self._root, record)
            seen = [identity(path) for path in paths]
            try:
                self._require_state_kept(record, paths)
            except BrokenError as error:
                text = str(error)
            else:
                return
            now = self._locked(partial(self._drop_state_unless_changed, record, seen))
            if now is None:
                return  # it was evicted meanwhile
            if now:
                record = now[0]
                continue  # it was written again
            kind = "missing" if seen == [None] else "damaged"
            self._problem(kind, paths[0] if paths else None, text)
            return

    def _drop_state_unless_changed(
        self, record: StateRecord, seen: Sequence[Identity | None], connection: Connection
    ) -> list[StateRecord] | None:
        """As `_drop_unless_changed`."""
        now = states.find(connection, [record.id])
        if not now:
            return None
        paths = state_paths(self._root, record)
        again = replace(now[0], used_at=record.used_at)
        if again != record or [identity(path) for path in paths] != seen:
            return [again]
        if self._repair:
            # The file is left to `check_state_files`.
            self._states.drop(connection, [record])
        return []

    def _require_state_kept(self, record: StateRecord, paths: Sequence[Path]) -> None:
        if not paths:
            raise BrokenError(f"the index holds a state {record.id!r} that can have no file")
        try:
            with StateFile(paths[0], model=record.model, state_id=record.id) as file:
                if self._tensors:
                    file.verify()
                found = record_of(file.header, file.size_bytes)
        except SemKVError as error:
            raise BrokenError(error) from error
        if (record.namespace, record.key) != (found.namespace, found.key):
            raise BrokenError("the index says another namespace or image than its file")
        self.bytes += found.bytes
        said = (record.rows, record.width, record.dtype, record.bytes)
        if said != (found.rows, found.width, found.dtype, found.bytes):
            self._notice("stale", paths[0], "the index says another shape or size")
            if self._repair:
                self._states.promise(paths, mending=True)

    def _read_state(self, path: Path) -> StateHeader:
        with StateFile(path, model=None) as file:
            header = file.header
            if self._tensors:
                file.verify()
        if state_path(self._root, header.model, header.namespace, header.id) != path:
            raise StateFileError(f"state file {path.name} is not where it belongs")
        return header
