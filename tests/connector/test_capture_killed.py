"""A process that is killed while it stores a prompt loses that prompt, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from semkv_rag.engine import Engine
from workbench.answers import SAMPLING, assert_same, blended, plain
from workbench.chunks import random_tokens
from workbench.settings import ENGINE_ARGS, ROOT
from workbench.starts import program
from workbench.tiered import tiered

START_SECONDS = 300

# Its files are written whole and never synced: where a power cut or a kill would do most harm.
SCRIPT = """
import json, sys
from semkv_rag import Engine, ReuseOptions
from semkv_rag.prompt_cache import PromptCacheOptions

first, second, store, model, namespace, sampling, arguments, reached = json.loads(sys.argv[1])

def stop_before_sync(worker, reached=reached):
    import os, pathlib, stat, time

    def fsync(descriptor):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # folders are synced before
            pathlib.Path(reached).touch()
            time.sleep(600)

    os.fsync = fsync

with Engine(model, store=store, prompt_cache=PromptCacheOptions(), encoders={}, **arguments) as engine:
    engine.observe(first, namespace=namespace)
    engine._loop.call(engine._llm.collective_rpc(stop_before_sync))
    engine.generate(second, sampling=sampling, reuse=ReuseOptions(namespace=namespace))
    engine._llm.prompt_lookup.settle(600)
"""


def kill_while_it_captures(arguments: list[object], reached: Path) -> None:
    with (
        program(),
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, json.dumps([*arguments, str(reached)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        ) as process,
    ):
        try:
            end = time.monotonic() + START_SECONDS
            while not reached.exists() and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            assert len(family) > 1, "the engine's processes"
            assert psutil.wait_procs(family, timeout=60)[1] == [], "they end with it"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.stdout is not None
        said = process.stdout.read()
    assert reached.exists(), said[-4000:]


@pytest.mark.soak
def test_only_that_prompt_is_lost(
    engine: Engine, reader: Path, namespace: str, tmp_path: Path
) -> None:
    store = engine.store
    assert store is not None
    before = store.verify()
    first, second = random_tokens(9301, 120), random_tokens(9302, 120)
    reached = tmp_path / "reached"
    kill_while_it_captures(
        [first, second, str(store.root), str(reader), namespace, SAMPLING, ENGINE_ARGS], reached
    )
    written = list(store.root.rglob("*.tmp"))
    assert len(written) == 1, "it was killed on the way"
    after = store.verify()
    assert set(after.problems) <= set(before.problems), "every promise is kept"
    assert after.chunks == before.chunks + 1
    with tiered(engine) as tiering:
        engine.reset_prefix_cache()
        one = blended(engine, first, namespace=namespace)
        assert (one.report.served_by, one.report.exact_tokens) == ("exact_text", 119)
        other = blended(engine, second, namespace=namespace)
        assert (other.report.served_by, other.report.kv_cache) == (None, "miss")
        tiering.settle()
        engine.reset_prefix_cache()
        again = blended(engine, second, namespace=namespace)
        assert (again.report.served_by, again.report.exact_tokens) == ("exact_text", 119)
    assert_same(one, plain(engine, first))
    assert_same(again, plain(engine, second))
