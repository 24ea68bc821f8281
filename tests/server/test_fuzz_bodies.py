"""Bodies that are drawn, on every route a tenant may POST to: none makes the server fail."""

from __future__ import annotations

import asyncio

import httpx

from semkv_rag.engine.caller import Caller, admitted, namespace_in
from semkv_rag.server.tenants import CONSOLE, OF_TENANTS
from semkv_rag.store import KVStore
from workbench.bodies import (
    body,
    engine_processes,
    judged,
    plain_answer,
    send,
    sound_bodies,
)
from workbench.server import Server

SEEDS = range(200)

NOT_HERE = {
    *("/classify", "/pooling", "/rerank", "/score", "/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/v1/audio/transcriptions", "/v1/audio/translations", "/v2/embed", "/v2/rerank"),
}
"""Of models that embed, score or hear."""
NOT_HERE.add(CONSOLE + "change")  # the server shows no console; `test_console` asks there

NO_POST = {"/v1/models", "/v1/realtime", "/version", "/semkv/v1/info"}
NO_POST |= {CONSOLE + name for name in ("state", "documents", "request")}


def namespaces(server: Server) -> set[str]:
    with KVStore(server.store, read_only=True) as store:
        return {stats.namespace for stats in store.stats()}


def test_no_body_makes_the_server_fail(server: Server) -> None:
    said, before = plain_answer(server), namespaces(server)
    outcome = asyncio.run(send(server, SEEDS))
    assert outcome.faults == []
    assert outcome.statuses.total() == len(SEEDS)
    assert plain_answer(server) == said
    assert len(engine_processes(server)) == 1
    assert namespaces(server) - before <= {"tenant"}


def test_every_route_is_drawn_and_its_sound_bodies_are_answered(server: Server) -> None:
    bodies = sound_bodies(server.model)
    assert bodies.keys() == OF_TENANTS - NOT_HERE - NO_POST
    assert bodies.keys() == {body(seed, server.model).path for seed in SEEDS}
    headers = {"Authorization": f"Bearer {server.tenant_key}"}
    base_url = server.base_url.removesuffix("/v1")
    with httpx.Client(base_url=base_url, headers=headers, timeout=60) as client:
        for path, sound in bodies.items():
            for one in sound:
                answer = client.post(path, json=one)
                assert judged(answer) == (501 if path == "/v1/systemone" else 200, ""), one


def test_a_stream_that_fails_ends_in_the_reason(server: Server) -> None:
    """vLLM cuts the connection there: it begins the stream before it finds that the prompt is empty."""
    answer = httpx.post(
        f"{server.base_url}/responses",
        json={"model": server.model, "input": "", "max_output_tokens": 1, "stream": True},
        headers={"x-api-key": server.tenant_key},
        timeout=60,
    )
    status, wrong = judged(answer)
    assert (status, wrong) == (400, "")
    assert "cannot be empty" in answer.text


def test_a_namespace_that_is_null_is_not_named() -> None:
    """The layer lets it in, and so does the door of the engine."""
    extra = {"kv_transfer_params": {"semkv": {"namespace": None}}}
    assert namespace_in(admitted(extra, Caller("a"))) == "a"
