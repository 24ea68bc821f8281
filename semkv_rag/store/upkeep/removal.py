"""What goes because somebody says so, pinned or not: documents, all that a model or a namespace has.

It runs beside live traffic, so a transaction removes at most 64 chunks. Documents go last: a run that is
killed leaves documents that are seen to be incomplete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from itertools import islice

from sqlalchemy import Connection

from semkv_rag.store.files.beneath import remove_if_possible
from semkv_rag.store.files.paths import window_path
from semkv_rag.store.gone import GoneFile, unlink
from semkv_rag.store.index import chunks, feed, limits, pins, prompts, sources
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.records import ChunkRecord, Collected, Limit, StateRecord, Taken
from semkv_rag.store.upkeep.contents import Contents
from semkv_rag.store.upkeep.eviction import (
    Eviction,
    Record,
    everything,
    expired,
    first_bytes,
    unused_longest,
    used_bytes,
)


class Removal:
    """Removes from one store."""

    def __init__(self, database: Database, contents: Contents, eviction: Eviction) -> None:
        self._database = database
        self._contents = contents
        self._eviction = eviction

    def documents(self, model: str, namespace: str, names: Sequence[str]) -> Taken:
        """Remove documents and the chunks that no other one lists."""

        def step(connection: Connection) -> tuple[Taken, list[GoneFile], bool]:
            own = sources.own_chunks(connection, model, namespace, names, FREED)
            found = chunks.records(connection, own, model, namespace)
            taken = counted(connection, found)
            last = len(own) < FREED
            if last:
                there = sources.remove(connection, model, namespace, names)
                taken = added([taken, Taken(sources=there)])
            return taken, self._contents.drop(connection, found), last

        total, done = Taken(), False
        while not done:
            taken, gone, done = self._database.freeing(step)
            unlink(self._database, self._contents.root, gone)
            total = added([total, taken])
        self._forget_windows({(model, namespace)})
        return total

    def scope(self, model: str | None, namespace: str | None) -> Taken:
        """Remove all that is of a model and a namespace, its pins too; None is any."""

        owners: set[tuple[str, str]] = set()

        def some_contents(connection: Connection) -> tuple[Taken, list[GoneFile]]:
            found = list(islice(everything(connection, model, namespace), FREED))
            owners.update((record.model, record.namespace) for record in found)
            return counted(connection, found), self._eviction.drop(connection, found)

        def some_documents(connection: Connection) -> Taken:
            page = sources.page(connection, model, namespace, FREED)
            there = sum(
                sources.remove(connection, fingerprint, name, [document])
                for fingerprint, name, document in page
            )
            return Taken(sources=there)

        def the_rest(connection: Connection) -> None:
            pins.drop_of(connection, model, namespace)
            prompts.forget_sightings(connection, model, namespace)
            if model is not None and namespace is None:
                chunks.drop_model(connection, model)

        total = Taken()
        while True:
            taken, gone = self._database.freeing(some_contents)
            unlink(self._database, self._contents.root, gone)
            if taken == Taken():
                break
            total = added([total, taken])
        while (taken := self._database.freeing(some_documents)) != Taken():
            total = added([total, taken])
        self._database.freeing(the_rest)
        self._forget_windows(owners)
        return total

    def _forget_windows(self, owners: Iterable[tuple[str, str]]) -> None:
        """Remove the window files of namespaces that have no chunk any more: they hold its chunks' ids.

        Args:
            owners: models and namespaces of which something was removed.
        """
        for model, namespace in owners:
            with self._database.scanning() as connection:
                left = namespace in feed.namespaces(connection, model)
            if not left:
                remove_if_possible(window_path(self._contents.root, model, namespace))


def documents_preview(
    connection: Connection, model: str, namespace: str, names: Sequence[str]
) -> Taken:
    """What `Removal.documents` would take."""
    own = sources.own_chunks(connection, model, namespace, names)
    there = sources.there(connection, model, namespace, names)
    found = chunks.records(connection, own, model, namespace)
    return added([counted(connection, found), Taken(sources=there)])


def scope_preview(connection: Connection, model: str | None, namespace: str | None) -> Taken:
    """What `Removal.scope` would take."""
    found = list(everything(connection, model, namespace))
    there = sources.count(connection, model, namespace)
    return added([counted(connection, found), Taken(sources=there)])


def collection_preview(
    connection: Connection, models: Iterable[str], now: float, instead: Limit | None = None
) -> Collected:
    """What a collection would take.

    Args:
        instead: as if this were its scope's limit.
    """
    gone: dict[str, Record] = {}

    def taken(records: Iterable[Record]) -> Taken:
        found = [record for record in records if record.id not in gone]
        gone.update((record.id, record) for record in found)
        return counted(connection, found)

    of_models = [
        added(
            [
                taken(everything(connection, model, None)),
                Taken(sources=sources.count(connection, model, None)),
            ]
        )
        for model in models
    ]
    late = taken(expired(connection, now, instead))
    over: list[Taken] = []
    known = {limit.namespace: limit for limit in limits.every(connection)}
    if instead is not None:
        known[instead.namespace] = instead
    # The whole store's is looked at last, as by who adds.
    for limit in sorted(known.values(), key=lambda limit: limit.namespace is None):
        if limit.max_bytes is not None:
            name = limit.namespace
            left = used_bytes(connection, name) - sum(
                record.bytes for record in gone.values() if name in (None, record.namespace)
            )
            staying = (r for r in unused_longest(connection, name) if r.id not in gone)
            over.append(taken(list(first_bytes(staying, left - limit.max_bytes))))
    return Collected(added(of_models), late, added(over))


def counted(connection: Connection, records: Sequence[Record]) -> Taken:
    """Some chunks and states as a number of each."""
    ids = [record.id for record in records if isinstance(record, ChunkRecord)]
    return Taken(
        chunks=len(ids),
        states=sum(isinstance(record, StateRecord) for record in records),
        bytes=sum(record.bytes for record in records),
        pinned=len(pins.pinned_chunks(connection, ids)),
    )


def added(parts: Iterable[Taken]) -> Taken:
    """The sum of each number."""
    return Taken(*map(sum, zip(astuple(Taken()), *map(astuple, parts), strict=True)))
