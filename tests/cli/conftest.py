"""The command line, run as its entry point runs it, and a store to run it on."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semkv_rag.cli import main
from semkv_rag.corpus import precompute
from semkv_rag.store import KVStore
from tests.corpus.made_up_engine import MadeUpEngine


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and its two outputs."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """The JSON it printed, which must be all that it printed."""
        return json.loads(self.out)


Semkv = Callable[..., Outcome]


@pytest.fixture
def semkv(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Semkv:
    """Runs `semkv` with some arguments, answering its questions with `answer`."""
    for name in ("SEMKV_STORE", "SEMKV_MODEL", "SEMKV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: object, answer: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["semkv", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capfd.readouterr()
        code = end.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), out, err)

    return run


@pytest.fixture
def semkv_process() -> Semkv:
    """Runs `semkv` in a process of its own, as verbs that start vLLM want it."""

    def run(*arguments: object) -> Outcome:
        command = [sys.executable, "-m", "semkv_rag.cli", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Two documents of two chunks of eight tokens, one of which they share."""
    folder = tmp_path / "docs"
    folder.mkdir()
    shared = "w1 w2 w3 w4 w5 w6 w7 ."
    (folder / "a.txt").write_text(f"{shared} w11 w12 w13 w14 w15 w16 w17 .")
    (folder / "b.txt").write_text(f"{shared} w21 w22 w23 w24 w25 w26 w27 .")
    return folder


@pytest.fixture
def root(tmp_path: Path, docs: Path) -> Iterator[Path]:
    """A store with the documents in the namespaces `default` and `other`."""
    with KVStore(tmp_path / "store") as store:
        engine = MadeUpEngine(store)
        store.add_model(engine.fingerprint, {"model": "made-up", "dtype": "float32"})
        precompute(engine, [docs], chunk_tokens=8, context=["prefix"])
        precompute(engine, [docs / "a.txt"], chunk_tokens=8, namespace="other", context=["prefix"])
    return tmp_path / "store"
