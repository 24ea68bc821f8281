"""An engine's process that dies is an error for whoever waits for it; nobody waits for ever."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from semkv_rag.engine import Engine
from semkv_rag.errors import EngineError
from workbench.chunks import random_tokens, store_chunks
from workbench.engines import Engines
from workbench.inside import inside

SECONDS = 60
"""More than it takes on a busy machine to see that a process has gone."""


def take_what_was_written(engine: Engine) -> object:
    assert engine._capturer is not None
    return engine._capturer._take_captured()


def store_a_chunk(engine: Engine) -> object:
    return store_chunks(engine, [random_tokens(1, 60)], namespace="one")


def ask(engine: Engine) -> object:
    return engine.generate(random_tokens(2, 60))


@pytest.mark.parametrize("work", [take_what_was_written, store_a_chunk, ask])
@pytest.mark.parametrize("who", [os.getpid, os.getppid], ids=["worker", "engine"])
def test_who_waits_is_told(
    engines: Engines, reader: Path, work: Callable[[Engine], object], who: Callable[[], int]
) -> None:
    with engines.own(reader) as engine, ThreadPoolExecutor(1) as thread:
        process = inside(engine, lambda worker, who=who: who())  # type: ignore[misc]
        os.kill(process, signal.SIGSTOP)
        waits = thread.submit(work, engine)
        time.sleep(0.5)  # until it is asked
        assert not waits.done()
        os.kill(process, signal.SIGKILL)
        with pytest.raises(EngineError, match="stopped"):
            waits.result(SECONDS)
