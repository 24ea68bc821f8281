"""Stores over an object store of the tests, mostly an S3 server, and an index on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from semkv_rag.store import KVStore, StorePlace, place_of
from workbench import postgres, s3


@dataclass(frozen=True)
class Shared:
    """A bucket and an index that several stores share.

    Attributes:
        url: bucket and prefix.
        index_url: of the index.
        folder: the caches of the stores are below it.
    """

    url: str
    index_url: str
    folder: Path

    def place(self, name: str = "one", **options: float) -> StorePlace:
        """A store whose cache is a folder of this name."""
        return place_of(self.url, cache_dir=self.folder / name, **options)  # type: ignore[arg-type]

    def open(self, name: str = "one", *, read_only: bool = False, **options: float) -> KVStore:
        """The store, as another machine would open it."""
        place = self.place(name, **options)
        return KVStore(place, index_url=self.index_url, read_only=read_only)


@contextmanager
def shared_store(folder: Path, bucket: str | None = None) -> Iterator[Shared]:
    """A bucket, a new one of the S3 server where none is named, and an empty index."""
    bucket = bucket or f"s3://{s3.shared().bucket()}"
    with postgres.shared().schema() as index_url:
        yield Shared(f"{bucket}/some/prefix", index_url, folder)


def environment(endpoint: str) -> Mapping[str, str]:
    """What clients of a server, or a proxy, need."""
    return {**s3.ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
