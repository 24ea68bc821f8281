"""A fleet for ten minutes: two servers, precompute on Ray, PostgreSQL and an object store at once.

`semkv serve` runs twice over one store. Documents are stored through one of them and asked about
at the other, two actors on Ray compute a corpus into the same store, and a namespace lives under a limit
that drops its chunks as others come. Every answer is that of one engine over a plain folder.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pprint import pformat
from typing import Any

import httpx
import pytest

from semkv_rag import Engine, ReuseOptions
from semkv_rag.corpus import precompute_texts
from semkv_rag.report import ReuseReport
from semkv_rag.store import Limit
from tests.on_ray.conftest import WORDS
from tests.store.shared import Shared, environment, shared_store
from workbench import postgres, s3
from workbench.engines import Engines
from workbench.server import Server

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(0)]
logger = logging.getLogger(__name__)  # shown with --log-cli-level=INFO

SECONDS = 600.0
VISIBLE_S = 1.0
LOCK_WAIT_MS = 100
SLOW_STATEMENT_MS = 300
PREFIX = "answer by these passages :"
QUESTION = "Question : who leads Tre klim ? Answer :"
SAMPLING = {"max_tokens": 6, "temperature": 0}
LIMIT_BYTES = 6 << 20
"""Of the namespace `tenant`: a handful of its documents."""
RAY_DOCUMENTS = 40
PATIENCE_MS = 20_000
"""For a chunk's bytes: two cores carry all of this, and a busy machine fails no test of answers."""

Document = tuple[str, list[str]]


def made_up(rng: random.Random, name: str, chunks: int, words: int = 50) -> Document:
    return name, [" ".join(rng.choices(WORDS, k=words)) + " ." for _ in range(chunks)]


def prompt_of(*chunks: str, before: str = PREFIX) -> str:
    return " ".join([before, *chunks, QUESTION])


@dataclass(frozen=True)
class Answer:
    """What a server said to a prompt."""

    prompt: str
    text: str
    report: ReuseReport


@dataclass
class Fleet:
    """Two servers over one store, and what was seen of them."""

    servers: list[Server]
    shared: Shared
    until: float
    seen: Counter[str] = field(default_factory=Counter)
    to_compare: list[tuple[Document, Answer]] = field(default_factory=list)
    exact: list[Answer] = field(default_factory=list)
    visible_s: list[float] = field(default_factory=list)
    ray_documents: list[Document] = field(default_factory=list)

    def running(self) -> bool:
        return time.monotonic() < self.until

    def ask(self, server: Server, key: str, prompt: str, **reuse: Any) -> Answer:
        body = {
            "model": server.model,
            "prompt": prompt,
            **SAMPLING,
            "kv_transfer_params": {"semkv": reuse},
        }
        answer = httpx.post(
            f"{server.base_url}/completions",
            json=body,
            headers={"X-API-Key": key},
            timeout=300,
        )
        assert answer.status_code == 200, answer.text
        told = answer.json()
        report = ReuseReport.from_mapping(told["kv_transfer_params"]["semkv"])
        return Answer(prompt, told["choices"][0]["text"], report)

    def store(self, server: Server, key: str, *documents: Document) -> None:
        """Have a server store documents; returns when it says that it has."""
        url = server.base_url.removesuffix("/v1") + "/semkv/v1/precompute"
        body = {
            "documents": [{"name": name, "chunks": chunks} for name, chunks in documents],
            "prefix": PREFIX,
        }
        answer = httpx.post(url, json=body, headers={"X-API-Key": key}, timeout=300)
        (last,) = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1:]
        result = json.loads(last.removeprefix("data: "))["result"]
        assert (result["changed"], result["failures"]) == (len(documents), []), result


@pytest.fixture
def servers(reader: Path, tmp_path: Path) -> Iterator[tuple[list[Server], Shared]]:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment(s3.shared().endpoint).items():
            patch.setenv(name, value)
        shared = stack.enter_context(shared_store(tmp_path / "caches"))
        replicas = []
        for name in ("one", "other"):
            (folder := tmp_path / name).mkdir()
            where = [
                *("--store", shared.url, "--index-url", shared.index_url),
                *("--cache-dir", str(tmp_path / "caches" / name)),
                *("--fetch-timeout-ms", str(PATIENCE_MS)),
            ]
            replicas.append(
                stack.enter_context(Server(reader, folder, store_options=where, forked=False))
            )
        yield replicas, shared


def test_every_answer_is_that_of_one_machine(
    servers: tuple[list[Server], Shared],
    engines: Engines,
    reader: Path,
    tmp_path: Path,
    rounds: int,
) -> None:
    replicas, shared = servers
    rng = random.Random(0)
    base = [made_up(rng, f"base-{number}", 2) for number in range(12)]
    alone = engines.get(reader)
    precompute_texts(alone, base, prefix=PREFIX)
    chunks = [chunk for _, own in base for chunk in own]
    prompts = [
        prompt_of(*rng.sample(chunks, 3), before=f"{PREFIX} {' '.join(rng.choices(WORDS, k=4))}")
        for _ in range(300)
    ]
    right = {prompt: answer_alone(alone, prompt) for prompt in prompts}

    fleet = Fleet(replicas, shared, 0.0)
    fleet.store(replicas[0], Server.api_key, *base)
    with shared.open("limits") as store:
        store.lifecycle.set_limit(Limit("tenant", max_bytes=LIMIT_BYTES))
    fleet.until = time.monotonic() + SECONDS * rounds
    work: list[Callable[[], None]] = [
        lambda: read(fleet, replicas[0], right, seed=1),
        lambda: read(fleet, replicas[1], right, seed=2),
        lambda: write_and_ask_elsewhere(fleet, random.Random(3)),
        lambda: live_under_a_limit(fleet, random.Random(4)),
        lambda: collect(fleet),
        lambda: precompute_on_ray(fleet, reader, tmp_path, random.Random(5)),
    ]
    with lock_waits() as waits, ThreadPoolExecutor(len(work)) as threads:
        for future in as_completed([threads.submit(one) for one in work]):
            if future.exception():
                fleet.until = 0.0  # the others end, too
            future.result()
    logger.info("%s; visible after %.2f s at most", fleet.seen, max(fleet.visible_s))

    assert max(fleet.visible_s) < VISIBLE_S
    assert fleet.seen["blends"] > 100
    assert fleet.seen["evicted"] > 0
    assert fleet.seen["runs on Ray"] > 0
    compare(alone, fleet)
    with shared.open("verified") as store:
        assert store.verify().ok
        names = {source.name for source in store.sources(namespace="default")}
    assert {Path(name).name for name, _ in fleet.ray_documents} <= {
        Path(name).name for name in names
    }
    assert waits == []


def answer_alone(engine: Engine, prompt: str, **reuse: Any) -> Answer:
    engine.reset_prefix_cache()
    answer = engine.generate(prompt, sampling=SAMPLING, reuse=ReuseOptions(**reuse))
    return Answer(prompt, answer.text, answer.report)


def same(one: Answer, right: Answer) -> None:
    """The same text out of the same chunks."""
    seen = pformat((one.text, one.report.to_mapping(), right.text, right.report.to_mapping()))
    assert (one.report.kv_cache, right.report.kv_cache) == ("hit", "hit"), seen
    assert one.report.chunk_ids == right.report.chunk_ids, seen
    assert one.report.reused_tokens == right.report.reused_tokens, seen
    assert one.text == right.text, seen


def read(fleet: Fleet, server: Server, right: dict[str, Answer], seed: int) -> None:
    """Ask about what was stored before, over and over."""
    rng = random.Random(seed)
    prompts = list(right)
    while fleet.running():
        prompt = rng.choice(prompts)
        same(fleet.ask(server, Server.api_key, prompt), right[prompt])
        fleet.seen["blends"] += 1


def write_and_ask_elsewhere(fleet: Fleet, rng: random.Random) -> None:
    """Store a document through one server; the other knows it within a second."""
    number = 0
    while fleet.running():
        here, there = rng.sample(fleet.servers, 2)
        document = made_up(rng, f"new-{number}", 2)
        number += 1
        fleet.store(here, Server.api_key, document)
        stored = time.monotonic()
        prompt = prompt_of(*document[1][::-1])
        while True:
            sent = time.monotonic()
            answer = fleet.ask(there, Server.api_key, prompt)
            if answer.report.kv_cache == "hit" or sent - stored > 20:
                break
        fleet.visible_s.append(sent - stored)
        fleet.to_compare.append((document, answer))
        fleet.seen["documents"] += 1
        time.sleep(1)


def live_under_a_limit(fleet: Fleet, rng: random.Random) -> None:
    """Store more than the namespace may have; ask for what may be gone, and want plain answers."""
    documents: list[Document] = []
    while fleet.running():
        here, there = rng.sample(fleet.servers, 2)
        documents.append(made_up(rng, f"short-lived-{len(documents)}", 3))
        fleet.store(here, Server.tenant_key, documents[-1])
        for document in (documents[-1], rng.choice(documents)):
            prompt = prompt_of(*rng.sample(document[1], 3))
            answer = fleet.ask(there, Server.tenant_key, prompt, ratio=1.0)
            fleet.exact.append(answer)
            fleet.seen["evicted" if answer.report.kv_cache == "miss" else "exact"] += 1
        time.sleep(1)


def collect(fleet: Fleet) -> None:
    """As an operator's schedule does."""
    with fleet.shared.open("collecting") as store:
        while fleet.running():
            store.lifecycle.collect()
            fleet.seen["collections"] += 1
            time.sleep(5)


def precompute_on_ray(fleet: Fleet, reader: Path, folder: Path, rng: random.Random) -> None:
    """`semkv precompute --ray`, one corpus after another, with an engine on each core."""
    while fleet.running():
        docs = folder / f"docs-{fleet.seen['runs on Ray']}"
        docs.mkdir()
        for number in range(RAY_DOCUMENTS):
            name = f"{docs.name}-{number:02}.txt"
            document = made_up(rng, name, 6, words=20)
            (docs / name).write_text("\n\n".join(document[1]))
            fleet.ray_documents.append(document)
        command = [
            *(sys.executable, "-m", "semkv_rag.cli", "precompute", str(docs)),
            *("--model", str(reader), "--ray", "--ray-engines", "2", "--json"),
            *("--store", fleet.shared.url, "--index-url", fleet.shared.index_url),
            *("--cache-dir", str(folder / "caches" / "ray"), "--prefix", PREFIX),
            *("--chunk-tokens", "32", "--engine-arg", "dtype=float32"),
            *("--engine-arg", "max_model_len=1024", "--engine-arg", "block_size=32"),
            *("--engine-arg", f"kv_cache_memory_bytes={256 << 20}", "--engine-arg", "seed=0"),
        ]
        own = {"VLLM_CPU_OMP_THREADS_BIND": "auto", "RAY_worker_niceness": str(os.nice(0))}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | own
        )
        assert done.returncode == 0, done.stderr[-4000:]
        result = json.loads(done.stdout)
        assert (result["changed"], result["failures"]) == (RAY_DOCUMENTS, [])
        fleet.seen["runs on Ray"] += 1


def compare(alone: Engine, fleet: Fleet) -> None:
    """What was asked while it was stored, with one engine over a folder, and with plain vLLM."""
    documents = [document for document, _ in fleet.to_compare]
    precompute_texts(alone, documents, prefix=PREFIX)
    for _, answer in fleet.to_compare:
        same(answer, answer_alone(alone, answer.prompt))
    for answer in fleet.exact:
        assert answer.text == answer_alone(alone, answer.prompt, enabled=False).text, answer


@contextmanager
def lock_waits() -> Iterator[list[str]]:
    """What PostgreSQL's log says of waits for locks of more than `LOCK_WAIT_MS`, a line each.

    Slow statements are in the log, too: where the test fails, it says what the database was busy with.
    """
    server = postgres.shared()
    found: list[str] = []
    with server.connect() as connection:
        connection.execute("ALTER SYSTEM SET log_lock_waits = on")
        connection.execute(f"ALTER SYSTEM SET deadlock_timeout = {LOCK_WAIT_MS}")
        connection.execute(f"ALTER SYSTEM SET log_min_duration_statement = {SLOW_STATEMENT_MS}")
        connection.execute("ALTER SYSTEM SET log_line_prefix = '%m [%p] %a '")
        connection.execute("SELECT pg_reload_conf()")
        before = len(server.log())
        try:
            yield found
        finally:
            said = server.log()[before:]
            logger.info("PostgreSQL's log:\n%s", said)
            found += [one for one in said.splitlines() if "still waiting for" in one]
            connection.execute("ALTER SYSTEM RESET ALL")
            connection.execute("SELECT pg_reload_conf()")
