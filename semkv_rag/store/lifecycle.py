"""How long what is stored stays: limits, pins, collecting and removing.

Set by people and their schedules, kept by every process that adds. It stands in the index, so that all of
them see the same, and is gone with it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from semkv_rag.config import check_namespace
from semkv_rag.errors import OptionError
from semkv_rag.store.gone import finish
from semkv_rag.store.index import chunks, limits, pins, sources
from semkv_rag.store.index.database import Database
from semkv_rag.store.records import Collected, Limit, Pin, StateRecord, Taken
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents
from semkv_rag.store.upkeep.eviction import Eviction, Record, everything
from semkv_rag.store.upkeep.limited import Limited
from semkv_rag.store.upkeep.removal import (
    Removal,
    added,
    collection_preview,
    counted,
    documents_preview,
    scope_preview,
)


class Lifecycle:
    """Limits, pins and removal of one store; what asks the index raises StoreError as the store's own
    methods do.

    An add that a limit leaves no room for is a StoreLimitError. What is over a limit makes room for it,
    the longest unused first, never what is pinned or added in the same call.
    """

    def __init__(
        self,
        database: Database,
        contents: Contents,
        stored_states: StoredStates,
        eviction: Eviction,
    ) -> None:
        self._database = database
        self._files = contents.files
        self._eviction = eviction
        self._removal = Removal(database, contents, eviction)
        contents.admission = stored_states.admission = Limited(database, contents, eviction)

    @property
    def evicted(self) -> int:
        """Chunks and images' features that went in this process because of limits or of time."""
        return self._eviction.evicted

    # ---- limits ----------------------------------------------------------------------------

    def limits(self) -> list[Limit]:
        """The limits that are set, the whole store's first."""
        with self._database.scanning() as connection:
            return limits.every(connection)

    def limit(self, namespace: str | None = None) -> Limit:
        """A namespace's own limit, or the whole store's."""
        with self._database.scanning() as connection:
            found = limits.over(connection, [] if namespace is None else [namespace])
        return next((one for one in found if one.namespace == namespace), Limit(namespace))

    def set_limit(self, limit: Limit) -> None:
        """Set a limit in place of its scope's; one of neither bytes nor time takes that away.

        What is over it goes when something is added, or with `collect`.

        Raises:
            OptionError: it is no limit.
        """
        if limit.namespace is not None:
            check_namespace(limit.namespace)
        if limit.max_bytes is not None and (
            type(limit.max_bytes) is not int or not 0 <= limit.max_bytes < 2**63
        ):
            raise OptionError(
                f"max_bytes is {limit.max_bytes!r}: use a number of bytes from 0 up, or None"
            )
        if limit.ttl_s is not None and not 0 < limit.ttl_s < float("inf"):
            raise OptionError(f"ttl_s is {limit.ttl_s!r}: use seconds above 0, or None")
        with self._database.writing() as connection:
            limits.put(connection, limit)

    def room(self, namespace: str) -> int | None:
        """Bytes that a namespace may have beside what is pinned; None where there is no limit."""
        with self._database.scanning() as connection:
            rooms = [
                limit.max_bytes - pins.pinned_bytes(connection, limit.namespace)
                for limit in limits.over(connection, [namespace])
                if limit.max_bytes is not None
            ]
        return max(0, min(rooms)) if rooms else None

    # ---- pins ------------------------------------------------------------------------------

    def pins(self) -> list[Pin]:
        """The pins that are set, in the order of their making."""
        with self._database.scanning() as connection:
            return pins.every(connection)

    def pin(self, pin: Pin) -> None:
        """Keep what a pin names, also what is stored later, until it is removed by name.

        Raises:
            OptionError: it names nothing, or a document without its namespace.
        """
        if pin == Pin() or (pin.source is not None and pin.namespace is None):
            raise OptionError("a pin names a model, a namespace, or a document with its namespace")
        if pin.namespace is not None:
            check_namespace(pin.namespace)
        with self._database.writing() as connection:
            pins.put(connection, pin)

    def unpin(self, pin: Pin) -> bool:
        """Take a pin away; False when it is not set."""
        with self._database.writing() as connection:
            return pins.drop(connection, pin)

    def pinned(self, ids: Iterable[str]) -> set[str]:
        """Those of some chunks that are stored and pinned, by whatever pin."""
        with self._database.scanning() as connection:
            return pins.pinned_chunks(connection, ids)

    def named(self, which: Iterable[Pin]) -> Taken:
        """What pins name that is stored now, whether they are set or not."""
        found: dict[str, Record] = {}
        documents: set[tuple[str, str, str]] = set()
        with self._database.scanning() as connection:
            for pin in which:
                if pin.source is None:
                    records: Iterable[Record] = everything(connection, pin.model, pin.namespace)
                    there = sources.find(connection, pin.model, pin.namespace)
                else:
                    there = sources.find(connection, pin.model, pin.namespace, pin.source)
                    records = chunks.find(connection, {id_ for s in there for id_ in s.chunk_ids})
                found.update((record.id, record) for record in records)
                documents.update((one.model, one.namespace, one.name) for one in there)
            contents = counted(connection, list(found.values()))
        return added([contents, Taken(sources=len(documents))])

    # ---- what goes -------------------------------------------------------------------------

    def remove(
        self,
        model: str | None = None,
        namespace: str | None = None,
        names: Sequence[str] | None = None,
        *,
        dry_run: bool = False,
    ) -> Taken:
        """Remove documents, or all that is of a model and a namespace; with their pins, pinned or not.

        Args:
            model: a fingerprint; None is any.
            namespace: None is any.
            names: of documents, which go with the chunks that no other one lists.
            dry_run: only say what would go.
        """
        if names is None:
            if not dry_run:
                return self._removal.scope(model, namespace)
            with self._database.scanning() as connection:
                return scope_preview(connection, model, namespace)
        with self._database.scanning() as connection:
            owners = sources.owners(connection, model, namespace, names)
            if dry_run:
                return added(documents_preview(connection, *owner, names) for owner in owners)
        return added(
            self._removal.documents(*owner, piece)
            for owner in owners
            for piece in chunks.pieces(names)
        )

    def collect(self, models: Sequence[str] = (), *, dry_run: bool = False) -> Collected:
        """Remove some models with all that is theirs, then what expired, then what is over a limit.

        Runs beside engines: what they use of it they compute again.

        Args:
            models: fingerprints.
            dry_run: only say what would go.
        """
        now = time.time()
        if dry_run:
            with self._database.scanning() as connection:
                return collection_preview(connection, models, now)
        finish(self._database, self._files)
        of_models = added(self._removal.scope(model, None) for model in models)
        late = added(map(_unpinned, self._eviction.expire(now)))
        # The whole store's is looked at last, as by who adds.
        capped = sorted(self.limits(), key=lambda limit: limit.namespace is None)
        over = added(
            _unpinned(self._eviction.evict(limit.max_bytes, limit.namespace))
            for limit in capped
            if limit.max_bytes is not None
        )
        return Collected(of_models, late, over)

    def would_collect(self, limit: Limit) -> Collected:
        """What `collect` would take if a limit were set."""
        with self._database.scanning() as connection:
            return collection_preview(connection, (), time.time(), limit)


def _unpinned(records: Sequence[Record]) -> Taken:
    states = sum(isinstance(record, StateRecord) for record in records)
    return Taken(
        chunks=len(records) - states, states=states, bytes=sum(record.bytes for record in records)
    )
