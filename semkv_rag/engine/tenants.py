"""Who asks: what a request over HTTP may say of its reuse, and whose chunks it gets.

An ASGI layer in front of vLLM's OpenAI server. A client may set a request's options
(`kv_transfer_params: {"semkv": {"ratio": …}}`); they are checked here, so that a mistake is an answer
400 with the fix in it. The namespace is the server's to decide: its configuration, or the API key. The
layer writes it into every request, over whatever stood there, unless the operator trusts requests.

vLLM leaves the reuse report out of streamed answers: the layer adds it, as one more chunk with no
choices, before `[DONE]`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from blake3 import blake3
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from semkv_rag.config import DEFAULT_NAMESPACE, ReuseOptions, check_namespace
from semkv_rag.engine.transfer import PARAMS_KEY, TRANSFER_FIELD
from semkv_rag.errors import OptionError

OWN = "/semkv/v1/"
GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")

TakeReport: TypeAlias = Callable[[str], dict[str, Any] | None]
"""The report of the request whose id holds this string, once it is answered."""


@dataclass(frozen=True)
class Tenancy:
    """The server's rule for namespaces.

    Attributes:
        namespace: of requests whose API key has none of its own.
        by_api_key: namespaces by the BLAKE3 digest of an API key.
        trust_request: whether a request may name its namespace itself.
        reuse: the options of requests that bring none.
    """

    namespace: str = DEFAULT_NAMESPACE
    by_api_key: Mapping[bytes, str] = field(default_factory=dict)
    trust_request: bool = False
    reuse: ReuseOptions = field(default_factory=ReuseOptions)

    @classmethod
    def of_keys(
        cls,
        namespace: str,
        api_keys: Mapping[str, str],
        *,
        trust_request: bool,
        reuse: ReuseOptions,
    ) -> Tenancy:
        """The rule for API keys in plain text."""
        by_digest = {key_digest(key): check_namespace(name) for key, name in api_keys.items()}
        return cls(check_namespace(namespace), by_digest, trust_request, reuse)

    def apply(self, body: dict[str, Any], api_key: str | None) -> None:
        """Check the options in a request's body and write its namespace there.

        Raises:
            OptionError: an option is unknown, has an impossible value, or is not the client's.
        """
        if _holds(body.get("vllm_xargs"), TRANSFER_FIELD):
            raise OptionError(f"{TRANSFER_FIELD} stands in the request itself, not in vllm_xargs")
        transfer = body.get(TRANSFER_FIELD)
        transfer = {} if transfer is None else transfer
        wishes = transfer.get(PARAMS_KEY, {}) if isinstance(transfer, dict) else None
        if not isinstance(wishes, dict):
            raise OptionError(
                f'{TRANSFER_FIELD} is an object: {{"{PARAMS_KEY}": {{"ratio": 0.15}}}}'
            )
        namespace = self.namespace_of(api_key, wishes.get("namespace"))
        given = {**wishes, "namespace": namespace}
        ReuseOptions.from_mapping(given, self.reuse)
        body[TRANSFER_FIELD] = {**transfer, PARAMS_KEY: given}

    def namespace_of(self, api_key: str | None, wished: Any) -> str:
        """Whose chunks a request is about; `wished` is what it says itself, or None.

        Raises:
            OptionError: it may not say so, or it cannot be a namespace.
        """
        if wished is not None:
            if not self.trust_request:
                raise OptionError("the namespace comes from the server, not from the request")
            return check_namespace(wished)
        own = self.by_api_key.get(key_digest(api_key)) if api_key else None
        return own or self.namespace


def key_digest(api_key: str) -> bytes:
    """What is kept of an API key."""
    return blake3(api_key.encode()).digest()


class TenantMiddleware:
    """The ASGI layer; vLLM's server makes one, from `configure`'s settings."""

    tenancy = Tenancy()
    take_report: TakeReport = staticmethod(lambda request_id: None)
    routes: ASGIApp | None = None

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    @classmethod
    def configure(cls, tenancy: Tenancy, take_report: TakeReport, routes: ASGIApp) -> None:
        """vLLM makes a middleware with nothing but the app, so its settings stand on the class.

        Args:
            routes: what answers under `/semkv/v1/`.
        """
        cls.tenancy = tenancy
        cls.routes = staticmethod(routes)
        cls.take_report = staticmethod(take_report)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.routes is not None and _path(scope).startswith(OWN):
            await self.routes(scope, receive, send)
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        raw = await _read(receive)
        try:
            body = json.loads(raw)
        except ValueError:
            body = None  # vLLM says what is wrong with it
        if isinstance(body, dict):
            try:
                if _path(scope) in GENERATING:
                    self.tenancy.apply(body, api_key(Headers(scope=scope)))
                    raw = json.dumps(body).encode()
                else:
                    _refuse_params(body)
            except OptionError as error:
                fault = {"message": str(error), "type": "BadRequestError", "code": 400}
                await JSONResponse({"error": fault}, status_code=400)(scope, receive, send)
                return
        request_id = uuid.uuid4().hex
        headers = MutableHeaders(scope=scope)
        headers["content-length"] = str(len(raw))
        headers["x-request-id"] = request_id
        stream = _ReportingStream(send, lambda: self.take_report(request_id))
        await self._app(scope, _replay(raw, receive), stream.send)


def _path(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _refuse_params(value: Any) -> None:
    """No other way in: a request to any other route must not bring our parameters at all.

    Raises:
        OptionError: it does.
    """
    if isinstance(value, dict):
        if _holds(value.get(TRANSFER_FIELD), PARAMS_KEY):
            raise OptionError(
                f"{TRANSFER_FIELD} of {PARAMS_KEY} is taken by {', '.join(GENERATING)}"
            )
        for inner in value.values():
            _refuse_params(inner)
    elif isinstance(value, list):
        for inner in value:
            _refuse_params(inner)


def _holds(value: Any, key: str) -> bool:
    """Whether a client's value, which may be anything, is an object with this key."""
    return isinstance(value, dict) and key in value


class _ReportingStream:
    """Passes an answer on, and puts the reuse report into a stream of events before its end."""

    def __init__(self, send: Send, take_report: Callable[[], dict[str, Any] | None]) -> None:
        self._send = send
        self._take_report = take_report
        self._events = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self._events = kind.startswith("text/event-stream")
        elif self._events and b"data: [DONE]" in message.get("body", b""):
            before, mark, behind = message["body"].partition(b"data: [DONE]")
            report = self._take_report()
            if report is not None:
                chunk = {
                    "id": "",
                    "object": "semkv.report",
                    "created": 0,
                    "model": "",
                    "choices": [],
                }
                event = json.dumps({**chunk, TRANSFER_FIELD: report})
                before += f"data: {event}\n\n".encode()
            message = {**message, "body": before + mark + behind}
        elif not message.get("more_body", False):
            self._take_report()  # an answer in one piece has it already; forget it
        await self._send(message)


async def _read(receive: Receive) -> bytes:
    parts = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


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


def api_key(headers: Headers) -> str | None:
    """The API key that came with a request."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" and key else headers.get("x-api-key")
