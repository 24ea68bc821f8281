"""Documents: putting one in place of the one of its name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from semkv_rag.store.gone import unlink
from semkv_rag.store.index import sources
from semkv_rag.store.index.database import Database
from semkv_rag.store.index.guard import Refused
from semkv_rag.store.upkeep.contents import Contents


def put_document(
    database: Database,
    contents: Contents,
    model: str,
    namespace: str,
    name: str,
    digest: str,
    chunk_ids: Sequence[str],
) -> int:
    """See `KVStore.put_source`."""
    with database.scanning() as connection:
        is_new = not sources.there(connection, model, namespace, [name])
    late = contents.files.in_object_store
    if is_new:
        with suppress(Refused):  # somebody else put it meanwhile
            with database.writing(late=late) as connection:
                sources.add(connection, model, namespace, name, digest, chunk_ids)
            return 0
    with database.writing(late=late) as connection:
        unlisted = sources.replace(connection, model, namespace, name, digest, chunk_ids)
        removed, gone = contents.drop_ids(model, namespace, unlisted, connection)
    unlink(database, contents.root, gone)
    return removed
