"""The progress bar of long commands, on stderr; a line now and then where that is no terminal."""

from __future__ import annotations

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from semkv_rag.cli.output import say, size_in_words
from semkv_rag.corpus import PrecomputeProgress

LINE_S = 10.0
"""Where there is no terminal, a line is printed so often."""


class ProgressBar:
    """Shows how far a run is: its share, chunks, tokens/s, time left and bytes. A context manager.

    Args:
        things: what the run goes over, in words.
    """

    def __init__(self, things: str = "documents") -> None:
        self._things = things
        console = Console(stderr=True)
        self._lines = not console.is_terminal
        self._said_at = time.monotonic()
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("Reading", total=1.0, figures="")
        self._phase = "reading"
        self._phase_since = time.monotonic()

    def starting(self, model: str) -> None:
        """The engine is about to start, which takes a while and tells nothing."""
        self._progress.reset(self._task, total=None, description=f"Starting {model}")
        if self._lines:
            say(f"Starting {model}")

    def update(self, state: PrecomputeProgress) -> None:
        """Show `state`."""
        if state.phase != self._phase:
            self._phase = state.phase
            self._phase_since = time.monotonic()
            self._progress.reset(self._task, total=1.0, description="Computing")
        figures = f"{state.documents:,}/{state.documents_total:,} {self._things}"
        if state.phase == "computing":
            rate = state.tokens / max(1e-3, time.monotonic() - self._phase_since)
            figures += (
                f", {state.chunks:,} chunks, {rate:,.0f} tokens/s, {size_in_words(state.bytes)}"
            )
            if 0 < state.share < 1:
                figures += f" of about {size_in_words(state.bytes / state.share)}"
        self._show(state.share, figures)

    def count(self, done: int, total: int, name: str) -> None:
        """Show that `done` of `total` requests are through, and what the next one is about."""
        if self._phase != "asking":
            self._phase = "asking"
            self._phase_since = time.monotonic()
            self._progress.reset(self._task, total=1.0, description="Asking")
        figures = f"{done:,}/{total:,} requests, {name}"
        self._show(done / max(1, total), figures)

    def _show(self, share: float, figures: str) -> None:
        self._progress.update(self._task, completed=share, figures=figures)
        if self._lines and time.monotonic() - self._said_at > LINE_S:
            self._said_at = time.monotonic()
            say(f"{self._phase.capitalize()}: {share:.0%}, {figures}{self._left(share)}")

    def _left(self, share: float) -> str:
        """About how long the phase still takes, in words."""
        if not 0 < share < 1:
            return ""
        left_s = (time.monotonic() - self._phase_since) * (1 - share) / share
        return f", about {timedelta(seconds=round(left_s))} left"

    def stop(self) -> None:
        """Take the bar away; may be called again."""
        self._progress.stop()

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
