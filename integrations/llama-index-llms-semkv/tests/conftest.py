"""A store with the demo's corpus, and on it an engine in this process and a server in another."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from semkv_rag.corpus import precompute
from semkv_rag.engine import Engine

EXAMPLES = Path(__file__).parents[3] / "examples"
READER = str(EXAMPLES / "reader")
KV_CACHE_BYTES = 256 << 20
START_SECONDS = 240


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def engine(store: Path) -> Iterator[Engine]:
    with Engine(
        READER, store=store, dtype="float32", kv_cache_memory_bytes=KV_CACHE_BYTES
    ) as engine:
        precompute(engine, [EXAMPLES / "corpus"], chunk_tokens=32)
        yield engine


@pytest.fixture(scope="session")
def prompt() -> str:
    """Three documents of the corpus and a question whose answer is in the last."""
    names = ("mok-pis", "som-mel", "zur-stul")
    texts = [(EXAMPLES / "corpus" / "schools" / f"{name}.txt").read_text() for name in names]
    return "\n".join(texts) + "Question : who leads Zur stul ? Answer :"


@pytest.fixture(scope="session")
def answer() -> str:
    return "Ivan"


@pytest.fixture(scope="session")
def server(engine: Engine, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `semkv serve` on the engine's store."""
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        *(sys.executable, "-m", "semkv_rag.cli", "serve", READER, "--store", str(store)),
        *("--host", "127.0.0.1", "--port", port, "--served-model-name", "reader"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait(process, url, log)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_SECONDS
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        while time.monotonic() < until and process.poll() is None:
            try:
                client.models.list()
            except openai.APIConnectionError:
                time.sleep(0.5)
            else:
                return
    raise RuntimeError(f"the server did not start:{os.linesep}{log.read_text()[-4000:]}")
