"""What goes by itself: the longest unused beyond a number of bytes, and what expired; nothing pinned.

It works in short transactions. Each counts anew what is over, because others add and evict meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from typing import Final, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Connection, ScalarSelect, literal, select

from semkv_rag.store.gone import GoneFile, unlink
from semkv_rag.store.index import chunks, limits, pins, schema, states
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.records import ChunkRecord, Limit, StateRecord
from semkv_rag.store.states import StoredStates
from semkv_rag.store.upkeep.contents import Contents

STATE: Final = "state"
"""What eviction calls images' features, beside the chunks' kinds."""

Record: TypeAlias = ChunkRecord | StateRecord
_Found = TypeVar("_Found", ChunkRecord, StateRecord)


class Eviction:
    """Takes chunks and states of one store away, rows first, then files.

    Attributes:
        evicted: how many went because of limits or of time, so far.
    """

    def __init__(self, database: Database, contents: Contents, stored_states: StoredStates) -> None:
        self._database = database
        self._contents = contents
        self._states = stored_states
        self.evicted = 0

    def evict(
        self, max_bytes: int, namespace: str | None = None, kind: str | None = None
    ) -> list[Record]:
        """Remove what was unused for longest until `max_bytes` are left, or only what is pinned."""

        def surplus(connection: Connection) -> Iterable[Record]:
            over = used_bytes(connection, namespace, kind) - max_bytes
            return first_bytes(unused_longest(connection, namespace, kind), over)

        return [record for batch in self.batches(surplus) for record in batch]

    def expire(self, now: float) -> Iterator[list[Record]]:
        """Remove what was unused for longer than it may be; in each step what went."""
        return self.batches(partial(expired, now=now))

    def batches(self, find: Callable[[Connection], Iterable[Record]]) -> Iterator[list[Record]]:
        """Remove what `find` finds, at most `FREED` in a transaction, until it finds nothing."""

        def drop_some(connection: Connection) -> tuple[list[Record], list[GoneFile]]:
            some = list(islice(find(connection), FREED))
            return some, self.drop(connection, some)

        while True:
            # Looked at without the writers' lock first: mostly there is nothing.
            with self._database.scanning() as connection:
                if next(iter(find(connection)), None) is None:
                    return
            dropped, gone = self._database.freeing(drop_some)
            unlink(self._database, self._contents.root, gone)
            if not dropped:
                return
            self.evicted += len(dropped)
            yield dropped

    def drop(self, connection: Connection, records: Sequence[Record]) -> list[GoneFile]:
        """Take back promises; the files that are to be unlinked after the commit."""
        gone = self._contents.drop(connection, [r for r in records if isinstance(r, ChunkRecord)])
        return gone + self._states.drop(
            connection, [r for r in records if isinstance(r, StateRecord)]
        )


def unused_longest(
    connection: Connection, namespace: str | None, kind: str | None = None
) -> Iterator[Record]:
    """What is not pinned, in the order in which it goes."""
    return _in_order(
        connection,
        chunks.scope(None, namespace, kind) if kind != STATE else None,
        states.scope(None, namespace) if kind in (None, STATE) else None,
    )


def expired(connection: Connection, now: float, instead: Limit | None = None) -> Iterator[Record]:
    """What is not pinned and was unused for longer than it may be, in the order in which it goes.

    Args:
        instead: as if this were its scope's limit.
    """
    return _in_order(
        connection,
        limits.expired(connection, schema.chunks, now, instead),
        limits.expired(connection, schema.states, now, instead),
    )


def everything(
    connection: Connection, model: str | None, namespace: str | None
) -> Iterator[Record]:
    """All that is of a model and a namespace, pinned or not; None is any."""
    return _in_order(
        connection,
        chunks.scope(model, namespace),
        states.scope(model, namespace),
        pinned_too=True,
    )


def found(connection: Connection, ids: Collection[str]) -> list[Record]:
    """The chunks and states among `ids`, in no order."""
    return [*chunks.find(connection, ids), *states.find(connection, ids)]


def first_bytes(records: Iterable[Record], over: int) -> Iterator[Record]:
    """The first of `records` that take `over` bytes together."""
    for record in records:
        if over <= 0:
            return
        yield record
        over -= record.bytes


def used_bytes(connection: Connection, namespace: str | None, kind: str | None = None) -> int:
    """What chunks and states take; None is any namespace or kind."""
    return int(connection.scalar(select(bytes_in_use(namespace, kind))) or 0)


def bytes_in_use(namespace: str | None, kind: str | None = None) -> ColumnElement[int]:
    """`used_bytes`, as part of a statement."""
    sums: list[ScalarSelect[int]] = []
    if kind != STATE:
        sums.append(chunks.total_bytes(namespace, kind))
    if kind in (None, STATE):
        sums.append(states.total_bytes(namespace))
    return sum(sums, start=literal(0))


def _in_order(
    connection: Connection,
    of_chunks: ColumnElement[bool] | None,
    of_states: ColumnElement[bool] | None,
    *,
    pinned_too: bool = False,
) -> Iterator[Record]:
    orders: list[Iterator[Record]] = []
    if of_chunks is not None:
        if not pinned_too:
            of_chunks &= ~pins.chunk_pinned(connection)
        orders.append(_pages(partial(chunks.least_recently_used, connection, of_chunks, FREED)))
    if of_states is not None:
        if not pinned_too:
            of_states &= ~pins.state_pinned(connection)
        orders.append(_pages(partial(states.least_recently_used, connection, of_states, FREED)))
    return merge(*orders, key=lambda record: record.used_at)


def _pages(read: Callable[[tuple[float, str] | None], Sequence[_Found]]) -> Iterator[_Found]:
    after: tuple[float, str] | None = None
    while page := read(after):
        yield from page
        after = page[-1].used_at, page[-1].id
