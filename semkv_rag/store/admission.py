"""What is to be promised, and who looks first whether there is room for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sqlalchemy import Connection

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A chunk or state whose files, of `bytes` together, are on disk and whose row is to be written."""

    id: str
    model: str
    namespace: str
    bytes: int


class Admission(Protocol):
    """Writes rows within the store's limits."""

    def __call__(
        self,
        newcomers: Sequence[Newcomer],
        put: Callable[[Connection], Result],
        kept: Collection[str] = (),
    ) -> Result:
        """What `put` returns, called in a transaction in which there is room for the newcomers.

        Args:
            kept: ids that do not make room for them, beside their own.

        Raises:
            StoreLimitError: there is no room for all of them, whatever goes; nothing was done.
        """
        ...
