"""Where a store is: a folder, or an object store with a folder in front of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from blake3 import blake3

from semkv_rag.errors import OptionError

SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
CACHE_DIR_VARIABLE: Final = "SEMKV_CACHE_DIR"
CACHE_BYTES: Final = 20_000_000_000
FETCH_TIMEOUT_MS: Final = 200.0

# A `Path` has made one slash of the two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,3}(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """Files that are in an object store.

    Attributes:
        url: the bucket and the prefix, such as `s3://bucket/prefix`. Holds no credentials.
        cache_bytes: what the files in the local folder may take.
        fetch_timeout_ms: how long a request waits for files that do not come.
    """

    url: str
    cache_bytes: int = CACHE_BYTES
    fetch_timeout_ms: float = FETCH_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where a store is; made by `place_of`.

    Attributes:
        root: the store's folder, absolute; where the files are in an object store, the cache in front
            of it.
        objects: the object store, or None when the folder is all.
    """

    root: Path
    objects: ObjectPlace | None = None

    def to_mapping(self) -> dict[str, Any]:
        """As JSON; `from_mapping` reads it."""
        objects = None if self.objects is None else asdict(self.objects)
        return {"root": str(self.root), "objects": objects}

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> StorePlace:
        objects = values["objects"]
        place = None if objects is None else ObjectPlace(**objects)
        return StorePlace(Path(values["root"]), place)

    def __str__(self) -> str:
        return str(self.root) if self.objects is None else self.objects.url


def place_of(
    store: str | os.PathLike[str] | StorePlace,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    fetch_timeout_ms: float | None = None,
) -> StorePlace:
    """Where a store is that was named by its folder or its URL.

    Args:
        store: a folder, or a URL such as `s3://bucket/prefix`.
        cache_dir: with a URL, the folder for files that were read or written; unless given the variable
            SEMKV_CACHE_DIR, else a folder of the URL's own under ~/.cache/semkv.
        cache_bytes: with a URL, what that folder's files may take; 20 GB unless given.
        fetch_timeout_ms: with a URL, how long a request waits for files that do not come; 200 unless
            given.

    Raises:
        OptionError: it is no URL of an object store, or an option cannot be used.
    """
    if isinstance(store, StorePlace):
        return store
    found = _URL.fullmatch(os.fspath(store))
    if found is None:
        if (cache_dir, cache_bytes, fetch_timeout_ms) != (None, None, None):
            raise OptionError(
                f"{os.fspath(store)} is a folder: cache_dir, cache_bytes and fetch_timeout_ms go with"
                " the URL of an object store, such as s3://bucket/prefix"
            )
        return StorePlace(Path(store).absolute())
    url = _checked(found[1], found[2])
    _check_number("cache_bytes", cache_bytes)
    _check_number("fetch_timeout_ms", fetch_timeout_ms)
    folder = cache_dir or os.environ.get(CACHE_DIR_VARIABLE) or _own_folder(url)
    objects = ObjectPlace(
        url,
        CACHE_BYTES if cache_bytes is None else cache_bytes,
        FETCH_TIMEOUT_MS if fetch_timeout_ms is None else float(fetch_timeout_ms),
    )
    return StorePlace(Path(folder).expanduser().absolute(), objects)


def is_url(store: str | os.PathLike[str]) -> bool:
    """Whether a store is named by a URL, and not by its folder."""
    return _URL.fullmatch(os.fspath(store)) is not None


def _checked(scheme: str, rest: str) -> str:
    """The URL, without a slash at its end.

    Raises:
        OptionError: it cannot be one.
    """
    scheme = scheme.lower()
    if scheme not in SCHEMES:
        raise OptionError(
            f"a store at {scheme}:// cannot be opened: give a folder, or a URL of {', '.join(SCHEMES)}"
        )
    rest = rest.rstrip("/")
    url = f"file:///{rest.lstrip('/')}" if scheme == "file" else f"{scheme}://{rest}"
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # Not quoted: what stands there may be a secret.
        raise OptionError(
            "a store's URL holds a bucket and a prefix only: credentials come from the environment,"
            " such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if scheme != "file" and not parts.netloc:
        raise OptionError(f"{url} names no bucket: write it as s3://bucket/prefix")
    return url


def _check_number(name: str, value: float | None) -> None:
    if value is not None and (isinstance(value, bool) or not 0 < value < float("inf")):
        raise OptionError(f"{name} is {value!r}: give a number above 0")


def _own_folder(url: str) -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "semkv" / blake3(url.encode()).hexdigest(8)
