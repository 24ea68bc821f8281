"""How far the checks are: a bar on stderr, or a line for each check where that is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from semkv_rag.cli.output import say


class Steps:
    """Shows which of so many checks is under way."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._lines = not console.is_terminal
        self._done, self._total = 0, total
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
            disable=self._lines,
            transient=True,
        )
        self._task = self._bar.add_task("Starting", total=total)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The bar is there inside."""
        with self._bar:
            yield

    def begin(self, what: str) -> None:
        """The next check begins."""
        self._bar.update(self._task, description=what, completed=self._done)
        self._done += 1
        if self._lines:
            say(f"{self._done}/{self._total} {what}")
