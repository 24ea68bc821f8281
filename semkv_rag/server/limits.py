"""What one client may take of the server, so that the others are still answered in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from semkv_rag.errors import OptionError, SemKVError


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of `semkv serve`. Whoever goes beyond one is told which.

    Attributes:
        body_bytes: of a request's body.
        body_seconds: in which a body has to arrive.
        json_values: values and keys in a body of JSON, counted by its brackets, commas and colons; what
            stands in texts counts too. Checking a body takes the server's one thread.
        requests: of one namespace under way at a time. Those of the server's own routes count too. A
            request may hold several prompts or want several answers: of these as many are under way, and
            the others wait for them.
        runs: of those, calls of `precompute` and `forget`.
        namespace_bytes: from which on a namespace stores nothing more by `precompute`, all that it has
            stored counted; None is no limit.
        namespace_sources: sources that one namespace may have; None is no limit.
    """

    body_bytes: int = 32 << 20
    body_seconds: int = 60
    json_values: int = 200_000
    requests: int = 256
    runs: int = 2
    namespace_bytes: int | None = None
    namespace_sources: int | None = None

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Limits:
        """Limits by name; what is left out has its default.

        Raises:
            OptionError: one is unknown or cannot be.
        """
        known = [limit.name for limit in fields(cls)]
        if unknown := set(values) - set(known):
            raise OptionError(f"limits: unknown {sorted(unknown)}; there are {', '.join(known)}")
        return cls(**values)

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is None and limit.name.startswith("namespace_"):
                continue
            if type(value) is not int or value < 1:
                raise OptionError(f"{limit.name} is {value!r}: use a whole number from 1 up")


class LimitError(SemKVError):
    """A client goes beyond a limit; the message says which. Only the server raises it."""


class UnderWay:
    """What each namespace has under way. For one event loop."""

    def __init__(self, most: int, what: str) -> None:
        self._most = most
        self._what = what
        self._counts: Counter[str] = Counter()

    @contextmanager
    def one(self, namespace: str) -> Iterator[None]:
        """While it is entered, one more is under way.

        Raises:
            LimitError: the namespace has as many as it may.
        """
        if self._counts[namespace] >= self._most:
            raise LimitError(
                f"{self._most} {self._what} of this namespace are under way: wait for one"
            )
        self._counts[namespace] += 1
        try:
            yield
        finally:
            self._counts[namespace] -= 1
            if not self._counts[namespace]:
                del self._counts[namespace]


class Pace:
    """Has a namespace's bodies follow each other no faster than the server's one thread can spare.

    For one event loop.

    Args:
        per_second: of what is counted; a body waits until those before it are paid off.
    """

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._paid_off: dict[str, float] = {}

    async def keep(self, namespace: str, amount: float) -> None:
        """Wait until what the namespace sent before is paid off, and put this on its account."""
        now = asyncio.get_running_loop().time()
        self._paid_off = {name: at for name, at in self._paid_off.items() if at > now}
        turn = max(self._paid_off.get(namespace, now), now)
        self._paid_off[namespace] = turn + amount / self._per_second
        await asyncio.sleep(turn - now)
