"""The ASGI layer in front of vLLM's OpenAI server: who is let in, with how much, and in whose name.

A request passes, in this order:

1. its key and its path: nothing of a request is read before its key is known to be good for its path;
2. what its namespace has under way, and its body, which is read up to the limits;
3. the options of reuse in it, so that a mistake is an answer 400 with the fix in it;
4. the server, with `CALLER` set: whatever route it takes, that is what it enters the engine with.

vLLM leaves the reuse report out of streamed answers: the layer adds it to the chunk in which a
choice ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from typing import Any

from starlette._utils import get_route_path
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.caller import CALLER, Caller, wishes_of
from semkv_rag.engine.streamed import events_with_report
from semkv_rag.errors import OptionError
from semkv_rag.server.limits import LimitError, Limits, Pace, UnderWay
from semkv_rag.server.tenants import CONSOLE_PAGE, OF_TENANTS, OPEN, OWN, READY, Tenancy
from semkv_rag.wire import TRANSFER_FIELD

logger = logging.getLogger(__name__)

NAMESPACE_HEADER = "x-semkv-namespace"
"""The header by which a trusted client names its namespace, on every route."""

_STRUCTURE = b"[]{},:"

_SUSPECT = (b"\\ud", b"\\uD", b"\0")
"""What JSON has in it where it may hold text that cannot be encoded for the engine's process: halves of
UTF-16 pairs, escaped or in UTF-16 or UTF-32. They are looked for one by one, which takes a tenth of the
time of one pattern for all."""
_RAW_HALF = re.compile(rb"\xed[\xa0-\xbf]")
_DIGITS = bytes(48 if 48 <= code < 58 else 32 for code in range(256))
_LONG_INTEGER = b"0" * 19
"""Among `_DIGITS`: an integer that may have more than 64 bits."""

VALUES_PER_SECOND = 1_000_000
"""JSON values of a namespace that are read, in the long run: some of what the server's thread can."""
BYTES_OF_A_VALUE = 16
"""What is as much work as a value."""

REFUSING_S = 0.1
"""What goes beyond a limit is refused after so long: else clients that ask again at once, and are refused
again, keep the server's thread from the others."""

_KEPT_BYTES = 64 << 10
"""A refused request whose body is no larger does not cost its connection: the server drops what still
comes of the body. Where a connection is closed meanwhile, the client meets a reset, not the answer."""


class _Refused(Exception):
    """A request is not passed on; why, for who sent it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Front:
    """The layer; vLLM's server makes one, from `configure`'s settings."""

    tenancy = Tenancy()
    limits = Limits()
    routes: ASGIApp | None = None
    under_way = UnderWay(limits.requests, "requests")
    pace = Pace(VALUES_PER_SECOND)

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @classmethod
    def configure(cls, tenancy: Tenancy, limits: Limits, routes: ASGIApp | None) -> None:
        """vLLM makes a middleware with nothing but the app, so its settings stand on the class.

        Args:
            routes: what answers under `/semkv/v1/`.
        """
        cls.tenancy = tenancy
        cls.limits = limits
        cls.routes = None if routes is None else staticmethod(routes)
        cls.under_way = UnderWay(limits.requests, "requests")
        cls.pace = Pace(VALUES_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            await self._pass(scope, receive, send)
        except _Refused as refused:
            await _answer(refused, scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope)  # as the router takes it
        headers = Headers(scope=scope)
        if path in OPEN or _is_preflight(scope, headers):
            await self._app(scope, receive, send)
            return
        if path in (READY, CONSOLE_PAGE) and self.routes is not None:
            await self.routes(scope, receive, send)
            return
        key = api_key(headers)
        if not self.tenancy.knows(key):
            raise _Refused(401, "Unauthorized")
        if not self.tenancy.allows(key, path):
            raise _Refused(403, f"{path} is the operator's: use the operator's key")
        caller = self._caller(key, headers)
        own = path.startswith(OWN) and self.routes is not None
        app = self.routes if own and self.routes is not None else self._app
        if path not in OF_TENANTS:
            await self._serve(app, caller, scope, receive, send)
            return
        try:
            with self.under_way.one(caller.namespace):
                if scope["type"] == "http" and scope["method"] == "POST":
                    body, values = await self._read(receive, headers)
                    await self.pace.keep(caller.namespace, values + len(body) // BYTES_OF_A_VALUE)
                    caller = self._check(body, caller, key)
                    receive = _replay(body, receive)
                await self._serve(app, caller, scope, receive, send)
        except LimitError as error:
            await asyncio.sleep(REFUSING_S)
            raise _Refused(429, str(error)) from error

    async def _serve(
        self, app: ASGIApp, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        # Never the client's: vLLM calls the request by it.
        MutableHeaders(scope=scope)["x-request-id"] = uuid.uuid4().hex
        token = CALLER.set(caller)
        stream = _ReportingStream(send, caller)
        try:
            await app(scope, receive, stream.send)
        except Exception as error:
            if not await stream.fail(error):
                raise
        finally:
            CALLER.reset(token)

    def _caller(self, key: str | None, headers: Headers) -> Caller:
        try:
            namespace = self.tenancy.namespace_of(key, headers.get(NAMESPACE_HEADER))
        except OptionError as error:
            raise _Refused(400, str(error)) from error
        return Caller(namespace, self.tenancy.reuse)

    async def _read(self, receive: Receive, headers: Headers) -> tuple[bytes, int]:
        """A request's body, and how many JSON values it holds at most."""
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                return await self._read_all(receive, headers)
        except TimeoutError:
            raise _Refused(
                408, f"the request did not arrive within {self.limits.body_seconds} s"
            ) from None

    async def _read_all(self, receive: Receive, headers: Headers) -> tuple[bytes, int]:
        most = self.limits.body_bytes
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told) > most:
            raise _Refused(413, f"the request is larger than {most} bytes")
        # FastAPI takes a body without a type for JSON, too.
        counted = "multipart/" not in headers.get("content-type", "")
        parts: list[bytes] = []
        size = values = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            part = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _Refused(413, f"the request is larger than {most} bytes")
            if counted:
                values += len(part) - len(part.translate(None, _STRUCTURE))
                if values > self.limits.json_values:
                    raise _Refused(
                        413, f"the request holds more than {self.limits.json_values} JSON values"
                    )
            parts.append(part)
            more = message.get("more_body", False)
        return b"".join(parts), values

    def _check(self, body: bytes, caller: Caller, key: str | None) -> Caller:
        """Check the options of reuse in a body; who it is from, where it may say so itself.

        What it overlooks is checked where the request enters the engine, but then an answer that is
        streamed has begun.
        """
        suspect = _is_suspect(body)
        if not suspect and TRANSFER_FIELD.encode() not in body:
            return caller
        try:
            given = _encodable(body) if suspect else json.loads(body)
        except OptionError as error:
            raise _Refused(400, str(error)) from error
        except (ValueError, RecursionError):
            return caller  # vLLM says what is wrong with it
        if not isinstance(given, dict) or given.get(TRANSFER_FIELD) is None:
            return caller
        try:
            wishes = wishes_of(given[TRANSFER_FIELD])
            if self.tenancy.trust_request and "namespace" in wishes:
                namespace = self.tenancy.namespace_of(key, wishes["namespace"])
                caller = Caller(namespace, caller.reuse)
            self.tenancy.namespace_of(key, wishes.get("namespace"))
            ReuseOptions.from_mapping({**wishes, "namespace": caller.namespace}, self.tenancy.reuse)
        except OptionError as error:
            raise _Refused(400, str(error)) from error
        return caller


def api_key(headers: Headers) -> str | None:
    """The API key of a request: OpenAI's clients send it the one way, Anthropic's the other."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" and key else headers.get("x-api-key")


def _is_suspect(body: bytes) -> bool:
    """Whether a body may hold what `_encodable` refuses. Tens of megabytes take tens of milliseconds."""
    return (
        any(part in body for part in _SUSPECT)
        or (b"\xed" in body and _RAW_HALF.search(body) is not None)
        or _LONG_INTEGER in body.translate(_DIGITS)
    )


def _encodable(body: bytes) -> Any:
    """The JSON in a body. What vLLM cannot encode for the engine's process it answers by 500.

    Raises:
        OptionError: it holds half of a UTF-16 pair, or an integer of more than 64 bits.
        ValueError: it is none.
        RecursionError: it is nested too deep.
    """
    given = json.loads(body, parse_int=_integer)
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise OptionError(f"the request holds U+{half:04X} alone, half of a UTF-16 pair") from error
    return given


def _integer(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**64:
        raise OptionError(f"the request holds {digits[:30]}, an integer of more than 64 bits")
    return number


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether vLLM's layer for CORS answers this itself; browsers send no key with it."""
    asks = "origin" in headers and "access-control-request-method" in headers
    return scope["type"] == "http" and scope["method"] == "OPTIONS" and asks


async def _answer(refused: _Refused, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": refused.message})
        return
    kinds = {401: "AuthenticationError", 403: "PermissionDeniedError", 429: "RateLimitError"}
    fault = {
        "message": refused.message,
        "type": kinds.get(refused.status, "BadRequestError"),
        "code": refused.status,
    }
    headers = {"retry-after": "1"} if refused.status == 429 else {}
    told = Headers(scope=scope).get("content-length", "")
    if refused.status == 408 or not told.isdecimal() or int(told) > _KEPT_BYTES:
        headers["connection"] = "close"  # what is left of the body is not read
    response = JSONResponse({"error": fault}, status_code=refused.status, headers=headers)
    await response(scope, receive, send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives `body` first, then what comes (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class _ReportingStream:
    """Passes an answer on, and puts the reuse report into a stream of events."""

    def __init__(self, send: Send, caller: Caller) -> None:
        self._send = send
        self._caller = caller
        self._events = False
        self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._events = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body" and self._events:
            self._ended = not message.get("more_body", False)
            body = events_with_report(message.get("body", b""), self._caller.report)
            message = {**message, "body": body}
        await self._send(message)

    async def fail(self, error: Exception) -> bool:
        """End a stream of events that has begun by one that tells the error; whether there is one.

        vLLM begins the stream of a response before it looks at the whole request, and then cuts the
        connection where it has something to complain of.
        """
        if not self._events or self._ended:
            return False
        cause = error.__cause__  # Starlette's error says only that the answer had begun
        fault = create_error_response(cause if isinstance(cause, Exception) else error)
        if fault.error.code >= 500:
            logger.exception("semkv: a stream ended in an error")
        told = f"event: error\ndata: {json.dumps(fault.model_dump())}\n\n".encode()
        await self._send({"type": "http.response.body", "body": told, "more_body": False})
        return True
