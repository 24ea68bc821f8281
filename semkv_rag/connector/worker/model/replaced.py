"""An attention implementation's `forward`, replaced for a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor

Forward: TypeAlias = Callable[..., Tensor]


@contextmanager
def replaced(impl: Any, wrap: Callable[[Forward], Forward]) -> Iterator[None]:
    """Inside the block `impl.forward` is what `wrap` makes of the present one."""
    before = vars(impl).get("forward")
    impl.forward = wrap(impl.forward)
    try:
        yield
    finally:
        if before is None:
            del impl.forward  # the class's own is back
        else:
            impl.forward = before
