"""How a server ends: what it has stored is whole, and no process of it stays.

That no process stays is also seen wherever a test's server ends (`workbench.server`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

from semkv_rag.store import KVStore
from workbench.chunks import random_tokens
from workbench.server import Server

pytestmark = pytest.mark.soak


def ask(server: Server, seed: int) -> None:
    prompt = random_tokens(seed, server.captures_beyond + 20)
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    headers = {"X-API-Key": server.tenant_key}
    answer = httpx.post(f"{server.base_url}/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200


@pytest.mark.engine
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGKILL, id="SIGKILL"),
    ],
)
def test_a_server_that_is_told_to_end(reader: Path, tmp_path: Path, number: int) -> None:
    asked = 1  # others would be alike, and served out of the first one
    with Server(reader, tmp_path, forked=False) as server:
        family = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        assert len(family) > 1, "the engine's process"
        for seed in range(asked):
            ask(server, 7000 + seed)
        os.kill(server.pid, number)  # right behind the answer: its prompt waits to be written
        _, alive = psutil.wait_procs(family, timeout=180)
        assert alive == []
    with KVStore(server.store) as store:
        stored = list(store.chunks(namespace="tenant"))
        assert store.verify().problems == ()
        if number == signal.SIGTERM:
            assert len(stored) == asked
            assert all(store.prompts.get(one.model, "tenant", [one.id]) for one in stored)
