"""A method of an attention implementation, replaced for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

Forward: TypeAlias = Callable[..., Any]


@contextmanager
def replaced(
    impl: Any, wrap: Callable[[Forward], Forward], name: str = "forward"
) -> Iterator[None]:
    """Inside the block the method is what `wrap` makes of the present one."""
    before = vars(impl).get(name)
    setattr(impl, name, wrap(getattr(impl, name)))
    try:
        yield
    finally:
        if before is None:
            delattr(impl, name)  # the class's own is back
        else:
            setattr(impl, name, before)
