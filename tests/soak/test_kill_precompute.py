"""`kill -9` at random moments of precompute, on the real engine: nothing promised is ever lost.

Each round starts `semkv precompute` on a folder whose documents change now and then, kills it with all
its processes at a random moment (most of them while chunks are being captured, some while vLLM
starts), and then holds the store to its promises: `verify` finds no problem, and every chunk that the
index promised before is still there unless its document changed. At the end an undisturbed run finishes
the work, and a second one finds nothing to do.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from workbench.settings import READER
from workbench.starts import program, run_program

pytestmark = [pytest.mark.soak, pytest.mark.engine]

WORDS = [
    word
    for word in json.loads((READER / "tokenizer.json").read_text())["model"]["vocab"]
    if not word.startswith("<")
]
DOCUMENTS = 300
KILLS = 8


@pytest.mark.timeout(0)
def test_nothing_promised_is_lost(tmp_path: Path, rounds: int) -> None:
    rng, kills = random.Random(rounds), KILLS * rounds
    docs, root = tmp_path / "docs", tmp_path / "store"
    docs.mkdir()
    for number in range(DOCUMENTS):
        write_document(docs, number, rng)
    KVStore(root).close()
    mid_capture = 0
    for _ in range(kills):
        before, sources = promised(root)
        with program():
            mid_capture += run_and_kill(docs, root, rng) > 0
        check(root, before, sources)
        if rng.random() < 0.2:
            write_document(docs, rng.randrange(DOCUMENTS), rng)
    last = run_program(*command(docs, root))
    assert last.returncode == 0, last.stderr[-4000:]
    with KVStore(root) as store:
        assert store.verify().ok
        assert len(store.sources()) == DOCUMENTS
        # Chunks that a killed run wrote of a text that has changed since are nobody's.
        store.verify(repair=True)
        assert store.verify().notices == ()
    again = run_program(*command(docs, root), "--json")
    assert again.returncode == 0, again.stderr[-4000:]
    assert json.loads(again.stdout)["unchanged"] == DOCUMENTS
    assert mid_capture > kills / 2, "too few kills fell into capturing"


def write_document(docs: Path, number: int, rng: random.Random) -> None:
    sentences = (" ".join(rng.choices(WORDS, k=20)) + " ." for _ in range(25))
    (docs / f"{number:03}.txt").write_text("\n\n".join(sentences))


def command(docs: Path, root: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "semkv_rag.cli", "precompute", str(docs), "--model", str(READER)),
        *("--store", str(root), "--chunk-tokens", "32", "--sync"),
        *("--engine-arg", "dtype=float32", "--engine-arg", f"kv_cache_memory_bytes={256 << 20}"),
    ]


def run_and_kill(docs: Path, root: Path, rng: random.Random) -> int:
    """Start precompute, kill it; how many chunk files it had written."""
    files = count_files(root)
    process = subprocess.Popen(
        command(docs, root),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
    )
    if rng.random() < 0.15:
        time.sleep(rng.uniform(0, 12))
    else:
        until = time.monotonic() + 180
        while count_files(root) == files and process.poll() is None:
            assert time.monotonic() < until, "precompute captures nothing"
            time.sleep(0.01)
        time.sleep(rng.expovariate(2))
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return count_files(root) - files


def count_files(root: Path) -> int:
    return sum(1 for _ in root.glob("chunks/*/*/*/*.safetensors"))


def promised(root: Path) -> tuple[set[str], dict[str, tuple[str, ...]]]:
    """The chunks the index promises, and each source's chunks."""
    with KVStore(root) as store:
        chunks = {record.id for record in store.chunks()}
        return chunks, {source.name: source.chunk_ids for source in store.sources()}


def check(root: Path, before: set[str], sources: dict[str, tuple[str, ...]]) -> None:
    with KVStore(root) as store:
        report = store.verify()
        assert report.ok, report.problems
    chunks, now = promised(root)
    given_up = {chunk for name, ids in sources.items() if now.get(name) != ids for chunk in ids}
    assert before - chunks <= given_up, "the index lost chunks of unchanged documents"
