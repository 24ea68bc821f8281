"""Thousands of bodies, sound and broken: the server answers each and stays as it was."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from pathlib import Path

import pytest

from semkv_rag.store import KVStore
from workbench.bodies import engine_processes, plain_answer, send
from workbench.server import Server

pytestmark = [pytest.mark.soak, pytest.mark.engine, pytest.mark.timeout(0)]
logger = logging.getLogger(__name__)  # shown with --log-cli-level=INFO

BODIES = 20_000
AT_A_TIME = 1_000

# A broken body may ask for an answer as long as the model can give.
SHORT = ["--override-generation-config", '{"max_new_tokens": 8}']


def test_whatever_a_tenant_sends(reader: Path, tmp_path: Path, rounds: int) -> None:
    first = secrets.randbits(48)
    print(f"the first of {BODIES * rounds} bodies has the seed {first}")  # noqa: T201 - shown when it fails
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it tells of each request
    statuses: Counter[int] = Counter()
    with Server(reader, tmp_path, SHORT) as server:
        said = plain_answer(server)
        for start in range(first, first + BODIES * rounds, AT_A_TIME):
            outcome = asyncio.run(send(server, range(start, start + AT_A_TIME)))
            for (_, status), count in outcome.statuses.items():
                statuses[status] += count
            logger.info(
                "%s; of the last %d %d are known, the slowest, seed %d, took %.1f s",
                *(dict(statuses), AT_A_TIME, outcome.known, outcome.slowest, outcome.slowest_s),
            )
            assert outcome.faults == []
            assert plain_answer(server) == said
        assert len(engine_processes(server)) == 1
        with KVStore(server.store, read_only=True) as store:
            assert {chunk.namespace for chunk in store.chunks()} == {"tenant"}
            assert {source.namespace for source in store.sources()} <= {"tenant"}
            assert store.verify().ok
