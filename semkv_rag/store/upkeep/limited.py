"""Adding within the store's limits: what is over makes room, in the transaction that adds.

So the limits hold, however many processes add at once. The chunks that go are chosen before that
transaction, while no writer waits, and chosen anew where others used the room meanwhile. This is called
for each chunk and state that is promised. Where there are no limits it is one small query.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import Final, TypeVar

from sqlalchemy import Connection

from semkv_rag.errors import StoreError, StoreLimitError
from semkv_rag.store.admission import Newcomer
from semkv_rag.store.gone import GoneFile, unlink
from semkv_rag.store.index import limits, pins
from semkv_rag.store.index.database import FREED, Database
from semkv_rag.store.index.guard import Refused, refuse
from semkv_rag.store.records import Limit
from semkv_rag.store.upkeep.contents import Contents
from semkv_rag.store.upkeep.eviction import (
    Eviction,
    Record,
    bytes_in_use,
    found,
    unused_longest,
    used_bytes,
)

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SWEEP_S: Final = 60.0
"""How often a process that adds looks for what expired."""

SWEPT: Final = 10
"""Transactions that it spends on that, so that who adds does not wait for long."""

UNLOCKED: Final = 3
"""So many times room is looked for without the writers' lock; after that, under it."""


class Limited:
    """Admits newcomers to one store: an `Admission`."""

    def __init__(self, database: Database, contents: Contents, eviction: Eviction) -> None:
        self._database = database
        self._contents = contents
        self._eviction = eviction
        self._swept_at = float("-inf")

    def __call__(
        self,
        newcomers: Sequence[Newcomer],
        put: Callable[[Connection], Result],
        kept: Collection[str] = (),
    ) -> Result:
        """See `Admission`."""
        self._sweep()
        kept = {*kept, *(newcomer.id for newcomer in newcomers)}
        failed = 0
        while True:
            locked = failed >= UNLOCKED
            try:
                room, gone, results = self._admit(newcomers, put, kept, locked=locked)
            except Refused:
                if locked:
                    raise
                failed += 1
                continue
            self._eviction.evicted += len(room.victims)
            if gone:
                unlink(self._database, self._contents.root, gone)
            if results:
                return results[0]

    def _admit(
        self,
        newcomers: Sequence[Newcomer],
        put: Callable[[Connection], Result],
        kept: Collection[str],
        *,
        locked: bool,
    ) -> tuple[_Room, list[GoneFile], list[Result]]:
        """One transaction: the room made, the files that go, and `put`'s result if it was enough.

        Args:
            locked: room is looked for under the writers' lock.

        Raises:
            Refused: others came first, and nothing was changed. Not for want of room where `locked`.
        """
        if not locked:
            with self._database.scanning() as connection:
                room = _Room(connection, newcomers, kept)
        late = not locked and self._contents.files.in_object_store
        with self._database.writing(late=late) as connection:
            if locked:
                room = _Room(connection, newcomers, kept)
            results = [put(connection)] if room.enough else []
            gone = self._eviction.drop(connection, room.victims)
            if results and not locked:
                room.require(connection)
        return room, gone, results

    def _sweep(self) -> None:
        """Take away some of what expired, every now and then."""
        if time.monotonic() - self._swept_at < SWEEP_S:
            return
        self._swept_at = time.monotonic()
        try:
            for _ in islice(self._eviction.expire(time.time()), SWEPT):
                pass
        except StoreError as error:  # adding says so itself, if it cannot be done either
            logger.info("semkv: what expired could not be taken away: %s", error)


class _Room:
    """Who makes room for newcomers, at one moment.

    Attributes:
        victims: at most `FREED`.
        enough: whether there is room once they are gone.

    Raises:
        StoreLimitError: there is no room, whatever goes.
    """

    def __init__(
        self, connection: Connection, newcomers: Sequence[Newcomer], kept: Collection[str]
    ) -> None:
        self._connection = connection
        self._kept = kept
        self.victims: list[Record] = []
        self.enough = True
        self._kept_to: list[Limit] = []
        over = limits.over(connection, {newcomer.namespace for newcomer in newcomers})
        capped = [limit for limit in over if limit.max_bytes is not None]
        if not capped:
            return
        ids = [newcomer.id for newcomer in newcomers]
        there = {record.id: record.bytes for record in found(connection, ids)}
        for limit in capped:
            coming = sum(
                newcomer.bytes - there.get(newcomer.id, 0)
                for newcomer in newcomers
                if limit.namespace in (None, newcomer.namespace)
            )
            if coming > 0:
                self._kept_to.append(limit)
                self._make_room(limit, coming)

    def require(self, connection: Connection) -> None:
        """Refuse the transaction where a limit is passed once the newcomers are there."""
        for limit in self._kept_to:
            assert limit.max_bytes is not None
            refuse(connection, bytes_in_use(limit.namespace) > limit.max_bytes)

    def _make_room(self, limit: Limit, coming: int) -> None:
        assert limit.max_bytes is not None
        over = used_bytes(self._connection, limit.namespace) + coming - limit.max_bytes
        over -= sum(victim.bytes for victim in self.victims if _is_under(limit, victim))
        if over <= 0:
            return
        chosen = {victim.id for victim in self.victims} | set(self._kept)
        going: list[Record] = []
        left = over
        for record in unused_longest(self._connection, limit.namespace):
            if left <= 0 or len(self.victims) + len(going) == FREED:
                break
            if record.id not in chosen:
                going.append(record)
                left -= record.bytes
        if left > 0:
            self.enough = False
            # Nothing goes in vain.
            if len(self.victims) + len(going) < FREED or self._movable(limit) < over:
                raise StoreLimitError(_refusal(limit, coming))
        self.victims += going

    def _movable(self, limit: Limit) -> int:
        """Bytes of what could make room, beside the victims."""
        pinned = pins.pinned_bytes(self._connection, limit.namespace)
        movable = used_bytes(self._connection, limit.namespace) - pinned
        kept = found(self._connection, self._kept)
        own = [record for record in kept if _is_under(limit, record)]
        held = pins.pinned_chunks(self._connection, (record.id for record in own))
        movable -= sum(record.bytes for record in own if record.id not in held)
        return movable - sum(victim.bytes for victim in self.victims if _is_under(limit, victim))


def _is_under(limit: Limit, record: Record) -> bool:
    return limit.namespace in (None, record.namespace)


def _refusal(limit: Limit, coming: int) -> str:
    # It does not say how much others have or have pinned: a tenant may read it.
    whose = "the store" if limit.namespace is None else f"namespace {limit.namespace}"
    scope = "" if limit.namespace is None else f" --namespace {limit.namespace}"
    return (
        f"{coming:,} bytes more do not fit into {whose}, which may take {limit.max_bytes:,}, and what is"
        f" pinned makes no room: semkv limit{scope} --max-bytes raises that, semkv unpin and semkv rm"
        " make room"
    )
