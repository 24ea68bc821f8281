"""A pytest plugin: how many engines the tests started, by whom, and how long that took.

Counted are engines in the tests' own processes, servers, and other programs that start engines (`semkv`,
examples, scripts), which tests run through `program`. Both workers' figures are printed at the end.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

ENGINE, SERVER, PROGRAM = "engine", "server", "program"
SHOWN = 25
_KEY = "semkv_starts"


@dataclass(frozen=True)
class Start:
    """One start.

    Attributes:
        kind: `engine`, `server`, or `program` for another one that starts engines of its own.
        by: the file of the test that was running.
        seconds: until the engine could answer; of a program, its whole run.
    """

    kind: str
    by: str
    seconds: float


_starts: list[Start] = []


def record(kind: str, began: float) -> None:
    """Note a start that began at this `time.monotonic()` and has just ended."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "before the first test")
    _starts.append(Start(kind, test.partition("::")[0], time.monotonic() - began))


@contextmanager
def program() -> Iterator[None]:
    """A program that starts an engine runs inside the block."""
    began = time.monotonic()
    try:
        yield
    finally:
        record(PROGRAM, began)


def run_program(
    *command: object,
    timeout_s: float = 500,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program that starts an engine, to its end; its outputs are texts."""
    with program():
        return subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            cwd=cwd,
            env={**os.environ, **env} if env else None,
        )


def count_engines() -> None:
    """Have every engine counted that this process starts from now on."""
    from semkv_rag.engine import Engine

    start: Callable[..., None] = Engine.__init__

    @wraps(start)
    def counted(self: Engine, *arguments: Any, **options: Any) -> None:
        began = time.monotonic()
        start(self, *arguments, **options)
        record(ENGINE, began)

    Engine.__init__ = counted  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_KEY] = [asdict(start) for start in _starts]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended: its starts are added to the controller's."""
    _starts.extend(Start(**start) for start in getattr(node, "workeroutput", {}).get(_KEY, ()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _starts:
        return
    terminalreporter.section("engines started")
    for kind, words in (
        (ENGINE, "engines in the tests' processes, seconds until they could answer"),
        (SERVER, "servers, seconds until they could answer"),
        (PROGRAM, "programs with engines of their own, seconds of their whole runs"),
    ):
        own = [start for start in _starts if start.kind == kind]
        if not own:
            continue
        terminalreporter.line(f"{len(own)} {words}: {sum(start.seconds for start in own):.0f}")
        by: dict[str, list[float]] = defaultdict(list)
        for start in own:
            by[start.by].append(start.seconds)
        slowest = sorted(by.items(), key=lambda entry: -sum(entry[1]))
        for file, seconds in slowest[:SHOWN]:
            terminalreporter.line(f"{sum(seconds):8.1f} s  {len(seconds):3}  {file}")
