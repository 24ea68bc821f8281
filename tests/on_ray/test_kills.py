"""Ray's actors are killed ten times while a corpus is computed; here with an engine that makes its KV up.

`tests/soak/test_kill_on_ray.py` is the same with vLLM, where each kill costs the start of an engine.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.corpus import precompute
from semkv_rag.errors import EngineError
from semkv_rag.on_ray import engine_actor, precompute_on_ray
from semkv_rag.store import KVStore
from tests.corpus.conftest import sentence
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine

KILLS = 10
DOCUMENTS, SENTENCES = 40, 12
HOW: dict[str, Any] = {"chunk_tokens": 8, "context": ["prefix"]}


class Actor(engine_actor.EngineActor):
    """With an engine that takes a while for each chunk, and whose process's id is in a folder."""

    def _start(self) -> None:
        pids = Path(self._job.engine_args["pids"])
        self._engine = self._capturer = MadeUpEngine(KVStore(self._place))
        self._engine.close = lambda: None
        self._engine.before_write = lambda: time.sleep(0.02)
        (pids / str(os.getpid())).touch()


class Mortal(Actor):
    """Whose engine stops for good at the first chunk of a certain document."""

    def _start(self) -> None:
        super()._start()

        def refuse(item: Any) -> None:
            if "w7" in self._engine.tokenizer.decode(item.tokens).split():
                raise EngineError("the engine stopped")

        self._engine.refuse = refuse


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of twelve sentences, each a chunk of its own; the vocabulary has some of them twice."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(DOCUMENTS):
        numbers = range(number * SENTENCES, (number + 1) * SENTENCES)
        (folder / f"{number}.txt").write_text(" ".join(sentence(n % 70) for n in numbers))
    return folder


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the actors' processes are noted, one file each."""
    monkeypatch.setattr("semkv_rag.on_ray.precompute._fingerprint", lambda *_: FINGERPRINT)
    monkeypatch.setattr("semkv_rag.on_ray.precompute.KnownFingerprint", _Unknown)
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


class _Unknown:
    def __init__(self, *_: object) -> None: ...

    def get(self) -> None: ...

    def remember(self, _: str) -> None: ...


@pytest.mark.soak
def test_ten_kills(
    ray_here: Any,
    reader: Path,
    folder: Path,
    pids: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("semkv_rag.on_ray.precompute.EngineActor", Actor)
    root, killed = tmp_path / "store", []
    over = threading.Event()

    def kill() -> None:
        files = 0
        while len(killed) < KILLS and not over.is_set():
            time.sleep(0.02)
            written = sum(1 for _ in root.glob("chunks/*/*/*/*.safetensors"))
            alive = [one for one in pids.iterdir() if Path("/proc", one.name).exists()]
            if written > files and alive:
                files = written
                victim = alive[len(killed) % len(alive)]
                os.kill(int(victim.name), signal.SIGKILL)
                victim.unlink()
                killed.append(victim.name)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        result = precompute_on_ray(str(reader), [folder], store=root, pids=str(pids), **HOW)
    finally:
        over.set()
        killer.join()
    assert len(set(killed)) == KILLS
    assert (result.changed, result.failures) == (DOCUMENTS, [])

    with KVStore(root) as store, KVStore(tmp_path / "alone") as alone:
        precompute(MadeUpEngine(alone), [folder], **HOW)
        assert [chunk.id for chunk in store.chunks()] == [chunk.id for chunk in alone.chunks()]
        assert [(one.name, one.chunk_ids) for one in store.sources()] == [
            (one.name, one.chunk_ids) for one in alone.sources()
        ]
        assert store.verify().ok
        assert store.verify(repair=True).notices == ()
        # What killed writers leave in temporary files goes once it is an hour old.
        files = sorted(path.name for path in root.glob("chunks/*/*/*/*.safetensors"))
        assert files == sorted(f"{chunk.id}.r0.safetensors" for chunk in alone.chunks())


@pytest.mark.soak
def test_a_document_that_kills_its_engines_is_the_only_one_that_fails(
    ray_here: Any,
    reader: Path,
    folder: Path,
    pids: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All but the documents of its parcel are stored."""
    monkeypatch.setattr("semkv_rag.on_ray.precompute.EngineActor", Mortal)
    monkeypatch.setattr("semkv_rag.on_ray.precompute.RETRIES", 1)
    for path in folder.iterdir():
        if int(path.stem) > 5:
            path.unlink()
    result = precompute_on_ray(
        str(reader), [folder], store=tmp_path / "store", pids=str(pids), **HOW
    )
    failed = {failure.source for failure in result.failures}
    assert "many/0.txt" in failed
    assert result.changed + len(failed) == 6
    assert result.changed > 0
    assert "stopped or was killed" in result.failures[0].reason
