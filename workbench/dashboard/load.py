"""Requests of every kind that the dashboard tells apart, to one server at once."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from semkv_rag.store import KVStore, Limit
from workbench.server import Server

PREFIX = "answer by these passages :"
STORED = 12
"""Chunks in the store while the load runs."""
WRITE_EVERY_S = 6
DAMAGE_EVERY_S = 25


@dataclass
class Load:
    """What asks.

    Attributes:
        chunks: texts; the first `STORED` are stored before, others come later or never.
        limit_bytes: of the namespace `tenant`, which gets more than that.
    """

    server: Server
    chunks: Sequence[str]
    limit_bytes: int
    until: float = 0.0

    def run(self, seconds: float) -> None:
        """For so long."""
        self._store(Server.api_key, "handbook", self.chunks[:STORED])
        with KVStore(self.server.store) as store:
            store.lifecycle.set_limit(Limit("tenant", max_bytes=self.limit_bytes))
        self.until = time.monotonic() + seconds
        work = (self._blends, self._others, self._writes, self._damages)
        with ThreadPoolExecutor(len(work)) as threads:
            done = [threads.submit(one, number) for number, one in enumerate(work)]
            for one in done:
                one.result()

    def _running(self) -> bool:
        return time.monotonic() < self.until

    def _ask(self, prompt: str, tokens: int = 12, **reuse: Any) -> None:
        body = {
            **{"model": self.server.model, "prompt": prompt, "temperature": 0},
            **{"max_tokens": tokens, "ignore_eos": True},
            "kv_transfer_params": {"semkv": reuse},
        }
        url = f"{self.server.base_url}/completions"
        headers = {"X-API-Key": Server.api_key}
        answer = httpx.post(url, json=body, headers=headers, timeout=300)
        assert answer.status_code == 200, answer.text

    def _store(self, key: str, name: str, chunks: Sequence[str]) -> None:
        body = {"documents": [{"name": name, "chunks": list(chunks)}], "prefix": PREFIX}
        url = self.server.base_url.removesuffix("/v1") + "/semkv/v1/precompute"
        answer = httpx.post(url, json=body, headers={"X-API-Key": key}, timeout=300)
        *_, last = (line for line in answer.text.splitlines() if line.startswith("data: "))
        assert json.loads(last.removeprefix("data: "))["result"]["failures"] == [], last

    def _blends(self, seed: int) -> None:
        """Passages in new orders, as a retriever finds them."""
        rng = random.Random(seed)
        while self._running():
            found = " ".join(rng.sample(self.chunks[:STORED], 3))
            self._ask(f"{PREFIX} {found} Question {rng.random()} : why ?", ratio=0.3)

    def _others(self, seed: int) -> None:
        """Without reuse, of nothing that is stored, mostly of nothing that is, long ones, and again."""
        rng = random.Random(seed)
        stored, never = self.chunks[:STORED], self.chunks[2 * STORED :]
        kinds: tuple[Callable[[], None], ...] = (
            lambda: self._ask(" ".join(rng.sample(stored, 2)), enabled=False),
            lambda: self._ask(" ".join(rng.sample(never, 2))),
            lambda: self._ask(" ".join([*rng.sample(never, 3), rng.choice(stored)])),
            lambda: self._ask(" ".join(rng.sample(never, 8))),
            lambda: self._ask(" ".join(never[:8])),
        )
        for kind in itertools.cycle(kinds):
            if not self._running():
                return
            kind()

    def _writes(self, seed: int) -> None:
        """More than the limit lets stay."""
        for number in itertools.count():
            if not self._running():
                return
            begin = number % STORED
            chunks = [f"{number} {one}" for one in self.chunks[begin : begin + 2]]
            self._store(Server.tenant_key, f"note-{number}", chunks)
            time.sleep(WRITE_EVERY_S)

    def _damages(self, seed: int) -> None:
        """A byte of a stored chunk flips, and what is then missing of the document is stored anew."""
        rng = random.Random(seed)
        while self._running():
            time.sleep(min(DAMAGE_EVERY_S, max(0.0, self.until - time.monotonic())))
            self._store(Server.api_key, "handbook", self.chunks[:STORED])
            with KVStore(self.server.store, read_only=True) as store:
                records = sorted(store.chunks(namespace="default"), key=lambda one: one.id)
                one = rng.choice(records)
                path = store.path(one.model, "default", one.id)
            content = bytearray(path.read_bytes())
            content[-100] ^= 1
            path.write_bytes(content)
