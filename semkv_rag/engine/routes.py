"""The server's own routes, for clients that store what they will ask about.

* `GET /semkv/v1/info`: the model, the store and what the server can do.
* `POST /semkv/v1/precompute`: store texts. Answered by server-sent events, so that a long run can be
  watched: `{"progress": …}`, then `{"result": …}` or `{"error": …}`.
* `POST /semkv/v1/forget`: remove sources.
* `POST /semkv/v1/outcome`: whether the answer of the donor that a request explored would have done.

The namespace is the tenant's, by the rule that requests follow (see `tenants`). API keys are checked
here: vLLM checks them under `/v1` only.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from semkv_rag.corpus import (
    DEFAULT_CONTEXT,
    ContextMode,
    PrecomputeProgress,
    forget_sources,
    precompute_texts,
)
from semkv_rag.corpus.context import context_modes
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.tenants import OWN, Tenancy, api_key, key_digest
from semkv_rag.errors import OptionError, SemKVError
from semkv_rag.report import Explored
from semkv_rag.store.identity import store_identity
from semkv_rag.tiers import Cascade

RUNS_AT_ONCE = 4
HEARTBEAT_SECONDS = 5.0

Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """An ASGI app.

    Args:
        tenancy: the server's rule for namespaces.
        capturer: computes and stores.
        about: what `info` tells beside what it knows itself.
        api_keys: who is let in; everybody when there are none.
        cascade: the tiers, or None.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        capturer: LLMCapturer,
        about: Mapping[str, Any],
        api_keys: Iterable[str],
        cascade: Cascade | None = None,
    ) -> None:
        self._tenancy = tenancy
        self._capturer = capturer
        self._about = about
        self._cascade = cascade
        self._keys = {key_digest(key) for key in api_keys}
        self._pool = ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="semkv-precompute")
        self._stopping = threading.Event()
        self._app = Starlette(
            routes=[
                Route(OWN + "info", self._guarded(self._info), methods=["GET"]),
                Route(OWN + "precompute", self._guarded(self._precompute), methods=["POST"]),
                Route(OWN + "forget", self._guarded(self._forget), methods=["POST"]),
                Route(OWN + "outcome", self._guarded(self._outcome), methods=["POST"]),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def close(self) -> None:
        """Stop what runs; finished chunks are kept."""
        self._stopping.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _guarded(self, handler: Handler) -> Handler:
        """`handler` for those who are let in, with its errors as answers."""

        async def guarded(request: Request) -> Response:
            key = api_key(request.headers)
            if self._keys and (key is None or key_digest(key) not in self._keys):
                return JSONResponse({"error": "Unauthorized"}, status_code=401)
            try:
                return await handler(request)
            except OptionError as error:
                return _failure(error, 400)
            except SemKVError as error:
                return _failure(error, 500)

        return guarded

    def _namespace(self, request: Request, wished: Any) -> str:
        return self._tenancy.namespace_of(api_key(request.headers), wished)

    async def _info(self, request: Request) -> Response:
        namespace = self._namespace(request, request.query_params.get("namespace"))
        store = self._capturer.store
        # With the last change: what was stored when a cache saw it may have gone since.
        store_id = f"{store_identity(store)}/{namespace}/{store.last_change()}"
        return JSONResponse(
            {
                "fingerprint": self._capturer.fingerprint,
                "namespace": namespace,
                "store_id": store_id,
                **self._about,
            }
        )

    async def _forget(self, request: Request) -> Response:
        body = await _body(request, {"sources"}, {"namespace"})
        names = body["sources"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise OptionError('sources is a list of names: {"sources": ["manual.md"]}')
        store, model = self._capturer.store, self._capturer.fingerprint
        namespace = self._namespace(request, body.get("namespace"))
        removed = await asyncio.to_thread(forget_sources, store, model, namespace, names)
        return JSONResponse({"removed": removed})

    async def _outcome(self, request: Request) -> Response:
        body = await _body(request, {"explored", "correct"}, {"namespace"})
        correct = body["correct"]
        try:
            explored = Explored(**body["explored"])
        except TypeError as error:
            raise OptionError("explored is what the request's report has there") from error
        similarity = explored.similarity
        sound = isinstance(similarity, int | float) and -1.01 < similarity < 1.01
        if not isinstance(correct, bool) or not sound:
            raise OptionError('an outcome is {"explored": …, "correct": true or false}')
        if self._cascade is None:
            raise OptionError("the server was started without --tiers")
        # Whatever namespace stands in the report, outcomes are told of the tenant's own prompts.
        own = replace(explored, namespace=self._namespace(request, body.get("namespace")))
        noted = await asyncio.to_thread(self._cascade.record, own, correct=correct)
        return JSONResponse({"noted": noted})

    async def _precompute(self, request: Request) -> Response:
        body = await _body(request, {"documents"}, {"namespace", "head", "context"})
        documents = _documents(body["documents"])
        head = body.get("head") or ""
        if not isinstance(head, str):
            raise OptionError("head is a text")
        namespace = self._namespace(request, body.get("namespace"))
        context = body.get("context", DEFAULT_CONTEXT)
        if not isinstance(context, list | tuple):
            raise OptionError('context is a list of modes: ["head", "left"]')
        events = self._run(documents, namespace, head, context_modes(context))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _run(
        self,
        documents: list[tuple[str, list[str]]],
        namespace: str,
        head: str,
        context: Sequence[ContextMode],
    ) -> AsyncIterator[str]:
        """The events of a run. Leaving it stops the run."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        left = threading.Event()

        def put(event: dict[str, Any] | None) -> None:
            with suppress(RuntimeError):  # the server's loop is closed
                loop.call_soon_threadsafe(events.put_nowait, event)

        def tell(progress: PrecomputeProgress) -> None:
            if left.is_set() or self._stopping.is_set():
                raise SemKVError("the run was stopped")
            put({"progress": asdict(progress)})

        def work() -> None:
            try:
                result = precompute_texts(
                    self._capturer,
                    documents,
                    namespace=namespace,
                    head=head,
                    context=context,
                    on_progress=tell,
                )
                put({"result": asdict(result)})
            except Exception as error:
                put({"error": {"message": str(error), "type": type(error).__name__}})
            finally:
                put(None)

        self._pool.submit(work)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(events.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield ":\n\n"  # a comment, for clients that give up on a silent server
                    continue
                if event is None:
                    return
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            left.set()


async def _body(request: Request, needed: set[str], optional: set[str]) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        OptionError: it is none, or lacks a field, or has one that is unknown.
    """
    try:
        body = await request.json()
    except ValueError as error:
        raise OptionError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict) or not needed <= body.keys() <= needed | optional:
        raise OptionError(
            f"the request is a JSON object with {', '.join(sorted(needed))}"
            f" and, if wanted, {', '.join(sorted(optional))}"
        )
    return body


def _documents(given: Any) -> list[tuple[str, list[str]]]:
    return [_document(document) for document in (given if isinstance(given, list) else [None])]


def _document(given: Any) -> tuple[str, list[str]]:
    match given:
        case {"name": str(name), "chunks": [*chunks]}:
            texts = [text for text in chunks if isinstance(text, str)]
            if len(texts) == len(chunks):
                return name, texts
    raise OptionError('documents is a list of {"name": "…", "chunks": ["text", …]}')


def _failure(error: SemKVError, status: int) -> JSONResponse:
    fault = {"message": str(error), "type": type(error).__name__, "code": status}
    return JSONResponse({"error": fault}, status_code=status)
