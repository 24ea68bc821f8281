"""`examples/ray_serve.py`: two replicas of `semkv serve` over one store."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from semkv_rag.corpus import precompute_texts
from workbench.engines import Engines
from workbench.settings import ROOT
from workbench.starts import program

pytestmark = [pytest.mark.engine, pytest.mark.soak]

PREFIX = "answer by these passages :"
CHUNKS = [
    "the mascot of Mir bol is a red fox . the team plays on the old field near the river .",
    "the museum of Tal ven opens at nine . its first room shows the maps of the old town .",
]
PROMPT = f"{PREFIX} {CHUNKS[1]} {CHUNKS[0]} which mascot does Mir bol have ?"


@pytest.fixture(scope="module")
def url(ray_here: Any, reader: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a fleet of two replicas with an empty store."""
    serve = pytest.importorskip("ray.serve")
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import ray_serve
    finally:
        sys.path.pop(0)
    ray_here.cloudpickle.register_pickle_by_value(ray_serve)  # no replica can import it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(reader), "--store", str(tmp_path_factory.mktemp("fleet"))),
        *("--dtype", "float32", "--max-model-len", "1024", "--block-size", "32", "--seed", "0"),
        *("--kv-cache-memory-bytes", str(256 << 20)),
    ]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    with program():
        serve.run(ray_serve.fleet(command, replicas=2, cpus=0.5))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()


def test_what_one_replica_stores_the_other_finds_at_once(
    url: str, reader: Path, engines: Engines
) -> None:
    asked = {"model": str(reader), "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    document = {"name": "clubs", "chunks": CHUNKS}
    with httpx.Client(timeout=600) as client:
        # Each has answered once: what is measured is no start of anything.
        before: dict[str, str] = {}
        while len(before) < 2:
            warm = client.post(f"{url}/v1/completions", json=asked)
            before[warm.headers["x-semkv-replica"]] = warm.json()["choices"][0]["text"]
        assert len(set(before.values())) == 1

        body = {"documents": [document], "prefix": PREFIX}
        stored = client.post(f"{url}/semkv/v1/precompute", json=body)
        events = [line for line in stored.text.splitlines() if line.startswith("data: {")]
        result = json.loads(events[-1].removeprefix("data: "))["result"]
        assert (result["changed"], result["failures"]) == (1, [])

        done, answers = time.monotonic(), []
        with ThreadPoolExecutor(8) as askers:
            sent = [
                askers.submit(client.post, f"{url}/v1/completions", json=asked) for _ in range(8)
            ]
            assert time.monotonic() - done < 1, "all were sent within a second"
            answers = [one.result() for one in sent]
    reports = {one.headers["x-semkv-replica"]: [] for one in answers}
    for one in answers:
        reports[one.headers["x-semkv-replica"]].append(one.json()["kv_transfer_params"]["semkv"])
    assert reports.keys() == before.keys(), "both replicas answered"
    for own in reports.values():
        assert {report["kv_cache"] for report in own} == {"hit"}

    with engines.own(reader) as engine:
        assert engine.generate(PROMPT, sampling={"max_tokens": 8, "temperature": 0}).text in (
            set(before.values())
        )
        precompute_texts(engine, [("clubs", CHUNKS)], prefix=PREFIX)
        engine.reset_prefix_cache()
        alone = engine.generate(PROMPT, sampling={"max_tokens": 8, "temperature": 0})
        assert alone.report.kv_cache == "hit"
        assert {one.json()["choices"][0]["text"] for one in answers} == {alone.text}


def test_streams_and_errors_pass_through(url: str, reader: Path) -> None:
    asked = {"model": str(reader), "prompt": "the", "max_tokens": 3, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=600) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3
    wrong = httpx.post(f"{url}/v1/completions", json={"model": "no"}, timeout=600)
    assert wrong.status_code in (400, 404)
    assert "error" in wrong.json()
