"""Each route that generates, asked by one tenant: what it leaves is that tenant's, whatever the route."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from semkv_rag.engine import Engine
from semkv_rag.reuse import token_array
from semkv_rag.server.tenants import OF_TENANTS
from semkv_rag.store import KVStore
from workbench.chunks import random_tokens
from workbench.server import Server

GENERATES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "TEXT"}),
    "beam search": (
        "/v1/completions",
        {"prompt": "TEXT", "use_beam_search": True, "n": 2, "temperature": 0},
    ),
    "several prompts": ("/v1/completions", {"prompt": ["TEXT", "TEXT too"]}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
    "chat, beam search": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "TEXT"}], "use_beam_search": True, "n": 2},
    ),
    "chats": (
        "/v1/chat/completions/batch",
        {"messages": [[{"role": "user", "content": "TEXT"}]]},
    ),
    "responses": ("/v1/responses", {"input": "TEXT", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "TEXT"}]}),
    "scoring": (
        "/generative_scoring",
        {"query": "TEXT", "items": ["TEXT"], "label_token_ids": [9, 10]},
    ),
}


def body_of(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {name: body_of(inner, text) for name, inner in value.items()}
    if isinstance(value, list):
        return [body_of(inner, text) for inner in value]
    return value.replace("TEXT", text) if isinstance(value, str) else value


def stored(server: Server, namespace: str) -> set[bytes]:
    """The tokens of all that a namespace has stored."""
    found = set()
    with KVStore(server.store, read_only=True) as store:
        for record in list(store.chunks(namespace=namespace)):
            held = store.tokens(record.model, namespace, [record.id])
            found.update(chunk.tokens.tobytes() for chunk in held.values())
    return found


def post(server: Server, path: str, key: str | None, body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = server.base_url.removesuffix("/v1") + path
    return httpx.post(url, json=body, headers=headers, timeout=120)


@pytest.mark.parametrize("name", GENERATES)
def test_what_a_route_leaves_is_the_tenant_s(engine: Engine, server: Server, name: str) -> None:
    path, fields = GENERATES[name]
    assert path in OF_TENANTS
    tokens = random_tokens(4000 + list(GENERATES).index(name), server.captures_beyond + 60)
    text = engine.tokenizer.decode(tokens)
    body = {"model": server.model, "max_tokens": 2, **body_of(fields, text)}
    if name == "scoring":
        half = engine.tokenizer.decode(tokens[: len(tokens) // 2 + 20])
        body = {"model": server.model, **body_of(fields, half)}
    if name == "responses":
        del body["max_tokens"]
    mine = token_array(tokens[100:160]).tobytes()  # whatever template stands around them

    def has(namespace: str) -> bool:
        return any(mine in held for held in stored(server, namespace))

    assert post(server, path, None, body).status_code == 401
    answer = post(server, path, server.tenant_key, body)
    assert answer.status_code == 200, answer.text
    until = time.monotonic() + 60
    while not has("tenant"):
        assert time.monotonic() < until, "its prompt is stored, by the tiers"
        time.sleep(0.1)
    assert not has("default")
    # And the other tenant, who asks the same, has nothing of it.
    report = post(server, path, server.api_key, body).json().get("kv_transfer_params") or {}
    if report:
        told = report["semkv"]
        with KVStore(server.store, read_only=True) as store:
            own = {record.id for record in store.chunks(namespace="default")}
        assert {*told["chunk_ids"], *filter(None, [told["donor"]])} <= own
        # Its own: a chat's prefix, and what the prompts of one request share.
        own_too = name in ("several prompts", "beam search", "chat, beam search")
        assert told["cached_tokens"] <= 32 or own_too


def test_what_concerns_all_is_the_operator_s(server: Server) -> None:
    url = server.base_url.removesuffix("/v1")
    for path in ("/metrics", "/load", "/openapi.json", "/v1/responses/resp_1"):
        statuses = {
            key: httpx.get(url + path, headers={"X-API-Key": key}, timeout=60).status_code
            for key in ("nobody's", server.tenant_key, server.operator_key)
        }
        assert list(statuses.values())[:2] == [401, 403]
        assert statuses[server.operator_key] in (200, 404)
    assert httpx.get(url + "/health", timeout=60).status_code == 200


def test_info_tells_of_nobody_else(engine: Engine, server: Server) -> None:
    def info(key: str) -> dict[str, Any]:
        url = server.base_url.removesuffix("/v1") + "/semkv/v1/info"
        told: dict[str, Any] = httpx.get(url, headers={"X-API-Key": key}, timeout=60).json()
        return told

    before, theirs = info(server.tenant_key), info(server.api_key)
    prompt = random_tokens(99, server.captures_beyond + 20)
    stored_before = stored(server, "default")
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1}
    assert post(server, "/v1/completions", server.api_key, body).status_code == 200
    until = time.monotonic() + 60
    while stored(server, "default") == stored_before:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert info(server.tenant_key) == before
    assert info(server.api_key)["store_id"] != theirs["store_id"]


def test_keys_and_passwords_are_in_no_log(server: Server) -> None:
    log = server.log()
    assert len(log) > 100
    for secret in (server.api_key, server.tenant_key, server.operator_key):
        assert secret not in log
