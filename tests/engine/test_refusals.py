"""A client that is refused gets to read why, on a real connection."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from semkv_rag.config import ReuseOptions
from semkv_rag.server.front import Front
from semkv_rag.server.limits import Limits
from semkv_rag.server.tenants import Tenancy

ROUNDS = 50


@pytest.fixture(scope="module", params=["httptools", "h11"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Where `Front` listens; what stands behind it gives the body back."""
    tenancy = Tenancy.of_keys("ours", {"key": "a"}, trust_request=False, reuse=ReuseOptions())
    Front.configure(tenancy, Limits(), None)

    async def give_back(scope: Scope, receive: Receive, send: Send) -> None:
        response = JSONResponse(await Request(scope, receive).json())
        await response(scope, receive, send)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(Front(give_back), http=request.param, log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield listening.getsockname()[1]
        server.should_exit = True
        thread.join()
    Front.configure(Tenancy(), Limits(), None)


def test_what_comes_after_the_answer_does_not_reset_the_connection(port: int) -> None:
    """A body is sent behind its headers: it is still coming when the answer is given."""
    length = 50_000
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for _ in range(ROUNDS):
            connection.sendall(head)
            time.sleep(0.005)
            for part in range(0, length, 10_000):
                connection.sendall(b"x" * min(10_000, length - part))
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            assert answer.status == 401
            assert json.loads(answer.read())["error"]["message"] == "Unauthorized"


def written(value: object) -> Iterator[bytes]:
    """JSON in every encoding that vLLM reads, with its texts escaped and as they are."""
    for encoding in ("utf-8", "utf-16", "utf-32-le"):
        yield json.dumps(value, ensure_ascii=False).encode(encoding, "surrogatepass")
        yield json.dumps(value).encode(encoding)


@pytest.fixture
def client(port: int) -> Iterator[httpx.Client]:
    headers = {"x-api-key": "key"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60) as client:
        yield client


@pytest.mark.parametrize("half", ["\ud800", "a \udbff b", "\udc00\ud800", "\\\udfff"], ids=ascii)
def test_half_a_character_is_told_of(client: httpx.Client, half: str) -> None:
    """vLLM answers 500: what cannot be encoded is not to reach its engine."""
    for value in ({"prompt": half}, {half: 1}, [{"a": ["b", half]}]):
        for body in written(value):
            answer = client.post("/v1/completions", content=body)
            assert answer.status_code == 400, body
            assert "half of a UTF-16 pair" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text", ["\U0001f600", "\\ud800", "\uffff", "\ue000", "\0", "a"], ids=ascii
)
def test_whole_characters_pass(client: httpx.Client, text: str) -> None:
    for value in ({"prompt": text}, {text: [text]}):
        for body in written(value):
            assert client.post("/v1/completions", content=body).json() == value


@pytest.mark.parametrize(
    "number", [2**64, -(2**63) - 1, 10**30, 10**4000, -(10**30)], ids=lambda n: hex(n)[:30]
)
def test_an_integer_that_the_engine_cannot_be_told_is_refused(
    client: httpx.Client, number: int
) -> None:
    """vLLM answers 500 to some of them, too."""
    for body in written({"repetition_detection": {"max_pattern_size": number}}):
        answer = client.post("/v1/completions", content=body)
        assert answer.status_code == 400
        assert "more than 64 bits" in answer.json()["error"]["message"]


def test_other_numbers_pass(client: httpx.Client) -> None:
    value = [2**64 - 1, -(2**63), 0, 1e30, 0.1234567890123456789, "9" * 30, {"9" * 30: None}]
    for body in written(value):
        assert client.post("/v1/completions", content=body).json() == value
