"""Who is let in to which route, with how much: every route that vLLM's own server registers."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocketDisconnect
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.caller import CALLER
from semkv_rag.engine.vllm_compat import make_arg_parser
from semkv_rag.server.front import Front
from semkv_rag.server.limits import Limits
from semkv_rag.server.serve import MIDDLEWARE
from semkv_rag.server.tenants import OF_TENANTS, OPEN, OWN, Tenancy

A, B, OPERATOR = "key of a", "key of b", "key of the operator"
TENANTS = {A: "a", B: "b"}

FLAGS = ["--enable-scale-out", "--enable-offline-docs", "--enable-tokenizer-info-endpoint"]
TASKS: dict[str, tuple[str, ...]] = {
    "generate": ("generate",),
    "speech": ("generate", "transcription", "realtime"),
    "embed": ("embed", "token_embed"),
    "classify": ("classify", "token_classify"),
}


def rule(*, trust: bool = False) -> Tenancy:
    return Tenancy.of_keys("ours", TENANTS, [OPERATOR], trust_request=trust, reuse=ReuseOptions())


@pytest.fixture(autouse=True)
def front() -> Iterator[type[Front]]:
    Front.configure(rule(), Limits(), None)
    yield Front
    Front.configure(Tenancy(), Limits(), None)


def built(tasks: tuple[str, ...], flags: list[str]) -> FastAPI:
    """vLLM's server, without an engine behind it."""
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "m", *flags, "--middleware", MIDDLEWARE])
    model: Any = SimpleNamespace(
        pooler_config=None,
        architectures=[],
        architecture="",
        hf_config=SimpleNamespace(num_labels=1),
        is_cross_encoder=True,
        score_type="cross-encoder",
        get_pooling_task=lambda tasks: next(iter(tasks)),
    )
    level = logging.root.level
    try:
        return build_app(args, tasks, model)  # type: ignore[arg-type]
    finally:
        logging.root.setLevel(level)  # it sets it by VLLM_LOGGING_LEVEL, for all tests behind these


def routes_of(routes: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """Every method and path, WebSockets as the method `WS`."""
    for route in routes:
        inner = getattr(route, "router", None) or getattr(route, "original_router", None)
        if hasattr(route, "path"):
            methods = getattr(route, "methods", None)
            kind = "WS" if "WebSocket" in type(route).__name__ else "GET"
            path = before + route.path
            for method in methods or [kind]:
                yield method, path.replace("{path:path}", "x")
        elif inner is not None:
            yield from routes_of(inner.routes, before)
        else:
            raise AssertionError(f"what is {route!r}?")


@pytest.fixture(scope="module", params=TASKS)
def app(request: pytest.FixtureRequest) -> FastAPI:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
            patch.setenv(name, "1")
        return built(TASKS[request.param], FLAGS)


def filled(path: str) -> str:
    return "/".join("x" if part.startswith("{") else part for part in path.split("/"))


@pytest.mark.slow
def test_nobody_reaches_a_route_without_a_key(app: FastAPI) -> None:
    found = set(routes_of(app.routes))
    assert len(found) > 30
    assert app.user_middleware[0].cls is Front, "the outermost"
    client = TestClient(app, raise_server_exceptions=False)
    for method, path in found:
        if path in OPEN:
            continue
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": ""}):
            if method == "WS":
                with (
                    pytest.raises(WebSocketDisconnect) as closed,
                    client.websocket_connect(filled(path), headers=headers),
                ):
                    pass
                assert closed.value.code == 1008, path
            else:
                answer = client.request(method, filled(path), headers=headers, content=b"{}")
                assert answer.status_code == 401, (method, path)


class Inner:
    """What stands behind the layer: notes in whose name it was reached."""

    def __init__(self) -> None:
        self.reached: list[tuple[str, str]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = CALLER.get()
        body = await Request(scope, receive).body() if scope["type"] == "http" else b""
        self.reached.append((scope["path"], caller.namespace if caller else "nobody"))
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close"})
        else:
            await JSONResponse({"bytes": len(body)})(scope, receive, send)


@pytest.mark.slow
def test_each_key_reaches_its_own_routes_in_its_own_name(app: FastAPI) -> None:
    inner = Inner()
    client = TestClient(Front(inner))
    for method, path in set(routes_of(app.routes)) | {("POST", "/a/route/of/the/next/version")}:
        for key, namespace in ((A, "a"), (B, "b"), (OPERATOR, "ours")):
            headers = {"x-api-key": key}
            inner.reached = []
            if method == "WS":
                if path in OF_TENANTS or key == OPERATOR:
                    with client.websocket_connect(path, headers=headers):
                        pass
            else:
                answer = client.request(method, path, headers=headers)
                allowed = key == OPERATOR or path in OF_TENANTS or path in OPEN
                assert answer.status_code == (200 if allowed else 403), (method, path, key)
                if not allowed:
                    assert inner.reached == []
                    continue
            who = "nobody" if path in OPEN else namespace
            assert inner.reached == [(path, who)], (method, path, key)


def test_the_list_of_tenants_routes_is_vllm_s() -> None:
    there = {path for tasks in TASKS.values() for _, path in routes_of(built(tasks, FLAGS).routes)}
    own = {path for path in OF_TENANTS if path.startswith(OWN)}
    assert OF_TENANTS - own - there == set()
    assert OPEN - there == set()
    # What generates or keeps state, and is the operator's alone.
    assert {"/invocations", "/inference/v1/generate", "/scale_elastic_ep", "/metrics"} <= there
    assert {path for path in there if "responses/{" in path}.isdisjoint(OF_TENANTS)


def test_a_root_path_opens_nothing(app: FastAPI) -> None:
    inner = Inner()
    for root in ("", "/base"):
        client = TestClient(Front(inner), root_path=root)
        assert client.post(f"{root}/v1/completions").status_code == 401
        assert client.post(f"{root}/v1/completions", headers={"x-api-key": A}).status_code == 200
        assert client.get(f"{root}/metrics", headers={"x-api-key": A}).status_code == 403
    assert [who for _, who in inner.reached] == ["a", "a"]


def test_a_browser_asks_before_it_sends_a_key() -> None:
    inner = Inner()
    client = TestClient(Front(inner))
    asks = {"Origin": "https://x.example", "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=asks).status_code == 200
    assert client.options("/v1/completions").status_code == 401


def test_without_keys_there_is_one_tenant() -> None:
    Front.configure(Tenancy(), Limits(), None)
    inner = Inner()
    client = TestClient(Front(inner))
    assert client.get("/metrics").status_code == 200
    assert client.post("/v1/completions", headers={"x-api-key": "any"}).status_code == 200
    assert {who for _, who in inner.reached} == {"default"}


def test_who_is_trusted_names_its_namespace() -> None:
    inner = Inner()
    client = TestClient(Front(inner), headers={"x-api-key": A})
    named = {"kv_transfer_params": {"semkv": {"namespace": "c"}}}

    def ask(path: str = "/v1/completions", **how: Any) -> int:
        return client.post(path, **how).status_code

    assert ask(headers={"x-semkv-namespace": "c"}) == 400
    assert ask(json=named) == 400
    Front.configure(rule(trust=True), Limits(), None)
    assert ask(headers={"x-semkv-namespace": "c"}) == 200
    assert ask("/generative_scoring", headers={"x-semkv-namespace": "c"}) == 200
    assert ask(json=named) == 200
    assert ask(json={}) == 200
    assert ask(headers={"x-semkv-namespace": "\x7f"}) == 400
    assert [who for _, who in inner.reached] == ["c", "c", "c", "a"]


@pytest.mark.parametrize(
    "wishes",
    [
        "x",
        [1],
        {"semkv": 1},
        {"semkv": {"ratio": 2}},
        {"semkv": {"speed": 1}},
        {"semkv": {"capture": {}}},
    ],
    ids=str,
)
def test_wrong_options_are_told_before_an_answer_begins(wishes: Any) -> None:
    client = TestClient(Front(Inner()), headers={"x-api-key": A})
    answer = client.post("/v1/completions", json={"kv_transfer_params": wishes})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


# ---- how much ----------------------------------------------------------------------------------


def test_a_body_is_refused_before_it_is_read_whole() -> None:
    Front.configure(rule(), Limits(body_bytes=1000, json_values=50), None)
    inner = Inner()
    client = TestClient(Front(inner))
    headers = {"x-api-key": A}
    taken = 0

    def parts() -> Iterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 1
            yield b"x" * 100

    assert client.post("/v1/completions", content=b"x" * 1001, headers=headers).status_code == 413
    assert client.post("/v1/completions", content=parts(), headers=headers).status_code == 413
    assert client.post("/v1/completions", content=b"[" * 51, headers=headers).status_code == 413
    assert client.post("/v1/completions", content=b"[" * 50, headers=headers).status_code == 200
    assert inner.reached == [("/v1/completions", "a")]


async def ask_slowly(client: httpx.AsyncClient, seconds: float) -> int:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(seconds)
        yield b"}"

    answer = await client.post("/v1/completions", content=parts(), headers={"x-api-key": A})
    return answer.status_code


@pytest.mark.slow
async def test_a_body_that_does_not_come() -> None:
    Front.configure(rule(), Limits(body_seconds=1), None)
    transport = httpx.ASGITransport(Front(Inner()))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        assert await ask_slowly(client, 0.1) == 200
        assert await ask_slowly(client, 5) == 408


async def test_what_a_namespace_has_under_way_is_its_own() -> None:
    Front.configure(rule(), Limits(requests=3), None)
    hold = asyncio.Event()

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await hold.wait()
        await JSONResponse({})(scope, receive, send)

    transport = httpx.ASGITransport(Front(inner))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

        async def ask(key: str) -> int:
            answer = await client.post("/v1/completions", headers={"x-api-key": key})
            if answer.status_code == 429:
                assert answer.headers["retry-after"]
            return answer.status_code

        waiting = [asyncio.create_task(ask(A)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert await ask(A) == 429
        other = asyncio.create_task(ask(B))
        await asyncio.sleep(0.05)
        hold.set()
        assert await asyncio.gather(*waiting, other) == [200] * 4
        assert await ask(A) == 200


# ---- the report --------------------------------------------------------------------------------


def test_the_report_stands_in_the_last_regular_chunk_and_nowhere_else() -> None:
    """What looks like an end in an answer's text is none."""
    looks = (
        '"finish_reason":"stop"\n\ndata: {"choices":[{"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    )
    more = {"choices": [{"index": 0, "text": looks, "finish_reason": None}]}
    last = {"id": "x", "choices": [{"index": 0, "text": looks, "finish_reason": "stop"}]}
    usage: dict[str, Any] = {"choices": [], "usage": {"total_tokens": 3}}
    events = [json.dumps(chunk, separators=(",", ":")) for chunk in (more, last, usage)]
    events += ['{"finish_reason":"', "[DONE]"]
    report = {"semkv": {"kv_cache": "hit"}}

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        caller = CALLER.get()
        assert caller is not None
        caller.report = report

        async def parts() -> AsyncIterator[str]:
            for event in events:
                yield f"data: {event}\n\n"

        response = StreamingResponse(parts(), media_type="text/event-stream")
        await response(scope, receive, send)

    client = TestClient(Front(inner), headers={"x-api-key": A})
    told = client.post("/v1/completions").text.split("\n\n")
    assert told.pop() == ""
    told = [event.removeprefix("data: ") for event in told]
    assert [told[0], *told[2:]] == [events[0], *events[2:]]
    assert json.loads(told[1]) == {**last, "kv_transfer_params": report}
