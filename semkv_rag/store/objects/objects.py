"""An object store: what of it the store needs, each call bounded in time.

obstore is imported when the first object is asked for. Its threads do not survive a fork, and a process
that is forked after that would wait for ever. So it is refused.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import IO, Any, Final, NamedTuple, TypeVar

from semkv_rag.errors import MissingExtraError, ObjectStoreError

logger = logging.getLogger(__name__)

READ_S: Final = 2.0
"""What one read of a few megabytes may take. Whoever waits for it may give up sooner."""
WRITE_S: Final = 30.0
"""The same of one write, of listing, and of asking for sizes, for which no request waits."""
WRITE_TRIES_S: Final = 75.0
"""Later than that behind its beginning no write is tried again."""
AT_ONCE: Final = 16
_PART_BYTES: Final = 8 << 20
_LONGEST_TEXT: Final = 200
_ENDPOINTS: Final = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURE_ENDPOINT",
)
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound")
"""How S3 and Google, and Azure, say that the bucket is missing, not the object."""


Result = TypeVar("Result")


class Part(NamedTuple):
    """A part of an object: its bytes, and those of all of it."""

    content: memoryview
    size: int


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object, as it is listed.

    Attributes:
        key: its name below the prefix.
        age_s: since it was written, by the object store's clock and ours.
    """

    key: str
    size: int
    age_s: float


class Objects:
    """The objects under a URL; safe for threads.

    Every method raises ObjectStoreError when the object store does not do it.

    Args:
        url: bucket and prefix.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Objects({self.url!r})"

    def require(self) -> None:
        """Make sure that objects can be asked for in this process; asks no one.

        Raises:
            MissingExtraError: the package is not installed.
            ObjectStoreError: credentials are missing, or the process was forked too late.
        """
        with self._lock:
            _ = self._reading, self._writing

    def read(self, key: str, begin: int, end: int) -> Part | None:
        """Bytes `begin` to `end` of an object, fewer where it ends; None where there is none."""

        def get() -> Part:
            found = _obstore().get(self._client("_reading"), key, options={"range": (begin, end)})
            size = found.meta["size"]
            content = memoryview(found.bytes())
            if len(content) != min(end, size) - begin:
                raise ObjectStoreError("the object store sent a part of what was asked for")
            return Part(content, size)

        return self._asked(get)

    def size(self, key: str) -> int | None:
        """An object's bytes; None where there is none."""
        return self._asked(lambda: int(_obstore().head(self._client("_writing"), key)["size"]))

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """As `size`, of several at once."""
        if len(keys) < 2:
            return [self.size(key) for key in keys]
        with ThreadPoolExecutor(AT_ONCE, "semkv-objects") as pool:
            return list(pool.map(self.size, keys))

    def put(self, key: str, file: IO[bytes]) -> None:
        """Write an object, whole or not at all."""
        with _in_words():
            try:
                _obstore().put(self._client("_writing"), key, file, chunk_size=_PART_BYTES)
            except FileNotFoundError:
                raise ObjectStoreError("its bucket is not there") from None

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; those that are not there count as deleted."""
        client = self._client("_writing")
        with _in_words():
            try:
                _obstore().delete(client, list(keys))
            except FileNotFoundError:  # as a folder says: the others may still be there
                for key in keys:
                    with suppress(FileNotFoundError):
                        _obstore().delete(client, key)

    def list(self, folder: str) -> Iterator[ObjectInfo]:
        """All objects under a folder, in the order of their names where the object store has one."""
        with _in_words():
            for batch in _obstore().list(self._client("_writing"), folder):
                now = datetime.now(UTC)
                for one in batch:
                    age = (now - one["last_modified"]).total_seconds()
                    yield ObjectInfo(one["path"], int(one["size"]), age)

    @cached_property
    def _reading(self) -> Any:
        return _client(self.url, READ_S, retries=1, tries_s=READ_S)

    @cached_property
    def _writing(self) -> Any:
        return _client(self.url, WRITE_S, retries=3, tries_s=WRITE_TRIES_S)

    def _client(self, name: str) -> Any:
        with self._lock:
            client = getattr(self, name)
        _use_here()
        return client

    def _asked(self, call: Callable[[], Result]) -> Result | None:
        with _in_words():
            try:
                return call()
            except FileNotFoundError as error:
                if any(text in str(error) for text in _NO_BUCKET):
                    raise ObjectStoreError("its bucket is not there") from None
                return None


_used: list[int] = []  # the process in which obstore's threads are


def used_in_this_process() -> bool:
    """Whether processes that are forked from now on cannot use object stores."""
    return bool(_used)


def _use_here() -> None:
    if not _used:
        _used.append(os.getpid())
    elif _used[0] != os.getpid():
        raise ObjectStoreError(
            "the object store cannot be used in a process that was forked from one that had used it"
        )


def _obstore() -> Any:
    try:
        import obstore
    except ImportError as error:
        raise MissingExtraError("obstore", "object-storage") from error
    return obstore


def _client(url: str, timeout_s: float, *, retries: int, tries_s: float) -> Any:
    """obstore's client.

    Args:
        timeout_s: of each try.
        tries_s: after which nothing is tried again.
    """
    _obstore()
    from obstore.store import from_url

    options: dict[str, Any] = {"mkdir": True}
    if not url.startswith("file:"):
        client: dict[str, Any] = {"timeout": f"{timeout_s}s", "connect_timeout": f"{timeout_s}s"}
        # Whoever names an endpoint without TLS wants none.
        if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):
            client["allow_http"] = True
        backoff = {
            "init_backoff": timedelta(milliseconds=10),
            "max_backoff": timedelta(seconds=1),
            "base": 2,
        }
        retry = {
            "max_retries": retries,
            "backoff": backoff,
            "retry_timeout": timedelta(seconds=tries_s),
        }
        options = {"client_options": client, "retry_config": retry}
    with _in_words():
        return from_url(url, **options)


@contextmanager
def _in_words() -> Iterator[None]:
    """The object store's errors as ours."""
    try:
        yield
    except (FileNotFoundError, ObjectStoreError, MissingExtraError):
        raise
    except Exception as error:  # obstore has a dozen kinds, of which some are Python's own
        logger.debug("semkv: the object store failed", exc_info=error)
        raise ObjectStoreError(f"the object store failed: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What an error's first line says, without addresses and objects' names: clients read it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = lines[0].rpartition(" - ")[2]
    return re.sub(r"\S*/\S*", "…", said)[:_LONGEST_TEXT]
