"""`kill -9` of Ray's actors, and of vLLM under them, while a corpus is computed: one run does it all."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from semkv_rag.corpus import LazyCapturer, precompute
from semkv_rag.on_ray import precompute_on_ray
from semkv_rag.store import KVStore
from tests.on_ray.conftest import WORDS
from workbench.settings import ENGINE_ARGS, READER

pytestmark = [pytest.mark.soak, pytest.mark.engine]

KILLS = 10
DOCUMENTS = 160
HOW: dict[str, Any] = {"chunk_tokens": 32, "prefix": "answer by these passages :"}
ACTOR, ENGINE = "ray::MapWorker", "VLLM::EngineCore"


class Killer(threading.Thread):
    """Kills an actor, or the engine process of one, each time that some more chunks are on disk."""

    def __init__(self, root: Path, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.killed: list[str] = []
        self.over = threading.Event()
        self._root = root
        self._rng = rng

    def run(self) -> None:
        seen = 0
        while len(self.killed) < KILLS and not self.over.is_set():
            time.sleep(0.05)
            files = count_files(self._root)
            if files < seen + 25:
                continue
            time.sleep(self._rng.uniform(0, 0.5))
            which = ENGINE if self._rng.random() < 0.3 else ACTOR
            if found := [one for one in of_this_run() if one.name().startswith(which[:15])]:
                self._rng.choice(found).kill()
                self.killed.append(which)
                seen = count_files(self._root)


def of_this_run() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def count_files(root: Path) -> int:
    return sum(1 for _ in root.glob("chunks/*/*/*/*.safetensors"))


@pytest.mark.timeout(0)
def test_nothing_is_lost_and_nothing_is_there_twice(
    tmp_path: Path, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "auto")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20
    )
    try:
        for number in range(rounds):
            folder = tmp_path / str(number)
            kill_and_check(folder, random.Random(number))
    finally:
        ray.shutdown()


def kill_and_check(folder: Path, rng: random.Random) -> None:
    docs, root = folder / "docs", folder / "store"
    docs.mkdir(parents=True)
    for number in range(DOCUMENTS):
        sentences = (" ".join(rng.choices(WORDS, k=20)) + " ." for _ in range(25))
        (docs / f"{number:03}.txt").write_text("\n\n".join(sentences))
    killer = Killer(root, rng)
    killer.start()
    result = precompute_on_ray(str(READER), [docs], store=root, **HOW, **ENGINE_ARGS)
    killer.over.set()
    killer.join()
    assert len(killer.killed) == KILLS, "the corpus was done before"
    assert (result.changed, result.failures) == (DOCUMENTS, [])

    expected = what_one_engine_would_compute(docs, folder / "empty")
    with KVStore(root) as store:
        assert store.verify().ok
        assert store.verify(repair=True).notices == (), "nothing lies there that no one needs"
        assert len(store.sources()) == DOCUMENTS
        ids = [chunk.id for chunk in store.chunks()]
        listed = {id_ for source in store.sources() for id_ in source.chunk_ids}
    assert len(ids) == len(set(ids)) == expected == count_files(root)
    assert set(ids) == listed
    again = precompute_on_ray(str(READER), [docs], store=root, **HOW, **ENGINE_ARGS)
    assert (again.unchanged, again.chunks_captured) == (DOCUMENTS, 0)


def what_one_engine_would_compute(docs: Path, root: Path) -> int:
    """How many chunks there are, counted as `semkv precompute --dry-run` does."""
    from semkv_rag.cli.precompute import _Counted
    from semkv_rag.engine.offline import OfflineModel

    with KVStore(root) as store, OfflineModel(str(READER), **ENGINE_ARGS) as model:
        counted = _Counted(model, store)
        lazy = LazyCapturer(store, fingerprint=lambda: model.fingerprint, start=lambda: counted)
        work = precompute(lazy, [docs], dry_run=True, **HOW).to_compute
    assert work is not None
    return work.chunks
