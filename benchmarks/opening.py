"""How long a store of a million chunks takes to open, and a prompt in it to be looked up.

    python benchmarks/opening.py [--chunks 1000000] [--folder DIR] [--repeats 30]

A store with an index of so many chunks of 512 tokens is made (SQLite, some 3 KB a chunk; no chunk files:
matching needs none), in a folder that is removed at the end. Then, each in a process of its own:

first   opening without a window file: until an engine could start, until all chunks are taken in and the
        file is written, and what look-ups find and take meanwhile
again   opening with the file: `KVStore`, `Catalogue`, `load`, and the look-up of a prompt with 16 stored
        chunks; then look-ups of all kinds of prompts, as in benchmarks/matcher.py
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from blake3 import blake3
from sqlalchemy import insert

from benchmarks.matcher import PREFIX, Prompts, chunks
from semkv_rag.connector.scheduler.catalogue import Catalogue
from semkv_rag.connector.scheduler.shelf import Shelf
from semkv_rag.errors import StoreError
from semkv_rag.store import ChunkKey, KVStore
from semkv_rag.store.files.header import token_bytes
from semkv_rag.store.index import feed, schema
from semkv_rag.store.index.database import Database
from workbench.figures import save, summary

MODEL = "benchmark-" + "0" * 54
NAMESPACE = "default"
BATCH = 5000


def chunk_ids(count: int) -> list[str]:
    """Ids that are as evenly spread as the store's, in their order: so the index is made in minutes."""
    return sorted(blake3(number.to_bytes(8, "little")).hexdigest() for number in range(count))


def fill(root: Path, count: int) -> float:
    """Make a store's index, as if so many chunks had been added (`store.index.promises.put_new`); the
    seconds it took.
    """
    started = time.perf_counter()
    with KVStore(root) as store:
        store.add_model(MODEL, {})
        url = store.index_url
    database = Database(url, read_only=False)
    context = token_bytes(PREFIX)
    digest = blake3(context).hexdigest()
    with database.writing() as connection:
        connection.execute(insert(schema.contexts), {"digest": digest, "tokens": context})
    all_ids = chunk_ids(count)
    for first in range(0, count, BATCH):
        ids = all_ids[first : first + BATCH]
        numbers = np.arange(first, first + len(ids))
        texts = chunks(numbers)
        with database.writing(durable=False) as connection:
            common: dict[str, Any] = {"model": MODEL, "namespace": NAMESPACE, "kind": "document"}
            common |= {"context": digest, "context_count": len(PREFIX), "ranks": 1}
            common |= {"token_count": texts.shape[1], "bytes": 0, "created_at": 0.0, "used_at": 0.0}
            connection.execute(insert(schema.chunks), [{"id": id_, **common} for id_ in ids])
            tokens = [
                {"chunk_id": id_, "tokens": token_bytes(text)}
                for id_, text in zip(ids, texts, strict=True)
            ]
            connection.execute(insert(schema.chunk_tokens), tokens)
            feed.append_new(connection, [ChunkKey(id_, MODEL, NAMESPACE) for id_ in ids])
    database.close()
    return time.perf_counter() - started


def shelf_of(catalogue: Catalogue) -> Shelf:
    """The only namespace's chunks."""
    (queue,) = catalogue._queues.values()
    return queue.shelf


def memory_mib() -> int:
    """The memory of this process that is its own, now."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) // 1024


def first_opening(root: Path, count: int) -> dict[str, Any]:
    """Opening without a window file."""
    prompts = Prompts(count)
    started = time.perf_counter()
    store = KVStore(root)
    catalogue = Catalogue(store)
    catalogue.load(MODEL)
    figures: dict[str, Any] = {"until_it_serves_s": round(time.perf_counter() - started, 2)}
    times_ms = []
    while (shelf := shelf_of(catalogue))._working:
        prompt = prompts.stored()
        asked = time.perf_counter()
        with suppress(StoreError):  # nothing of it is taken in yet
            catalogue.find(MODEL, NAMESPACE, prompt).result(60)
        times_ms.append((time.perf_counter() - asked) * 1e3)
        time.sleep(0.1)
    figures["until_the_file_is_written_s"] = round(time.perf_counter() - started, 2)
    figures["look_ups_meanwhile_ms"] = summary(times_ms)
    figures["look_ups_meanwhile_p99_ms"] = round(float(np.percentile(times_ms, 99)), 1)
    figures["peak_process_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    assert shelf._file is not None, "the file was written and is used"
    figures["file_bytes_per_chunk"] = round(shelf._file.size_bytes / count, 1)
    catalogue.close()
    store.close()
    return figures


def opening_again(root: Path, count: int, repeats: int) -> dict[str, Any]:
    """Opening with the file."""
    prompts = Prompts(count)
    prompt = prompts.stored()
    gc.collect()
    before_mib = memory_mib()
    started = time.perf_counter()
    store = KVStore(root)
    opened = time.perf_counter()
    catalogue = Catalogue(store)
    catalogue.load(MODEL)
    loaded = time.perf_counter()
    spans = catalogue.find(MODEL, NAMESPACE, prompt).result(60)
    found = time.perf_counter()
    index = shelf_of(catalogue)._index
    assert index is not None and len(spans) == 16 and len(index) == count
    gc.collect()
    figures: dict[str, Any] = {
        "store_s": round(opened - started, 3),
        "load_s": round(loaded - opened, 3),
        "first_look_up_ms": round((found - loaded) * 1e3, 1),
        "until_the_first_plan_s": round(found - started, 3),
        "bytes_per_chunk": round(index.nbytes / count, 1),
        "process_memory_more_mib": memory_mib() - before_mib,
    }
    figures["look_ups"] = {}
    for name in ("stored", "miss", "boilerplate", "neighbours", "document", "one_token"):
        times_ms, cpu_ms = [], []
        for repeat in range(repeats + 2):
            prompt = getattr(prompts, name)()
            began, cpu = time.perf_counter(), time.thread_time()
            index.match(prompt)
            if repeat >= 2:
                cpu_ms.append((time.thread_time() - cpu) * 1e3)
                times_ms.append((time.perf_counter() - began) * 1e3)
        figures["look_ups"][name] = {"ms": summary(times_ms), "cpu_ms": summary(cpu_ms)}
    catalogue.close()
    store.close()
    return figures


def _in_a_process(work: Any, *arguments: Any) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        figures: dict[str, Any] = pool.apply(work, arguments)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="for the store; a temporary one by default")
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="semkv-opening-", dir=options.folder))
    try:
        figures: dict[str, Any] = {"chunks": options.chunks}
        figures["filling_s"] = round(fill(root, options.chunks), 1)
        figures["index_bytes_per_chunk"] = (root / "index.sqlite").stat().st_size // options.chunks
        figures["first"] = _in_a_process(first_opening, root, options.chunks)
        figures["again"] = _in_a_process(opening_again, root, options.chunks, options.repeats)
    finally:
        shutil.rmtree(root)
    print(json.dumps(figures, indent=1))
    print(save("opening", figures))


if __name__ == "__main__":
    main()
