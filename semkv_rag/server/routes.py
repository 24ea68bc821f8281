"""The server's own routes, for clients that store what they will ask about.

* `GET /semkv/v1/info`: the model, the store and what the server can do.
* `POST /semkv/v1/precompute`: store texts. Answered by server-sent events, so that a long run can be
  watched: `{"progress": …}`, then `{"result": …}` or `{"error": …}`.
* `POST /semkv/v1/forget`: remove sources.
* `POST /semkv/v1/outcome`: whether the answer of the donor that a request explored would have done.
* `GET /ready`: 200 when prompts are answered with reuse: the gate has passed and the store's index
  answers. Anybody may ask, so it tells nothing else.

The namespace is the tenant's, by the rule that requests follow (see `tenants`); `front` has let the
client in, and has read the body within its limits. What waits for the store waits in threads of these
routes, none of which a request to the model ever needs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from semkv_rag.config import DEFAULT_NAMESPACE
from semkv_rag.corpus import (
    DEFAULT_CONTEXT,
    OnProgress,
    PrecomputeProgress,
    PrecomputeResult,
    forget_sources,
    precompute_texts,
)
from semkv_rag.corpus.context import context_modes
from semkv_rag.engine.caller import CALLER
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.prompt_lookup import PromptLookup
from semkv_rag.errors import OptionError, SemKVError
from semkv_rag.server.adapters import capturer_of
from semkv_rag.server.bodies import body_of, documents_of, explored_of, is_text
from semkv_rag.server.console import Console
from semkv_rag.server.limits import LimitError, Limits, UnderWay
from semkv_rag.server.runs import start_run
from semkv_rag.server.tenants import OWN, READY, Tenancy
from semkv_rag.store.cache_key import cache_key

T = TypeVar("T")

_VLLM = "semkv_rag.vllm_app"  # the key of vLLM's app in a scope, whose `app` becomes ours
RUNS_AT_ONCE = 8
ASKED_AT_ONCE = 4
LEFT_POLL_SECONDS = 0.2
FORGOTTEN_AT_ONCE = 64
"""Sources that are removed before it is asked whether the client is still there."""
ASKED_S = 1.0
ANSWERED_S = 2.0
"""Which the store's index has to answer in, for the server to be ready."""
RESTS = 3
"""Times as long as for a batch of names nothing is done: who waits for an answer needs the cores, too."""

Handler = Callable[[Request], Awaitable[Response]]


class Routes:
    """An ASGI app.

    Args:
        tenancy: the server's rule for namespaces.
        limits: what a namespace may take.
        capturer: computes and stores.
        about: what `info` tells beside what it knows itself.
        prompts: the prompt cache, or None.
        console: its page and what that asks for, or None.
    """

    def __init__(
        self,
        tenancy: Tenancy,
        limits: Limits,
        capturer: LLMCapturer,
        about: Mapping[str, Any],
        prompts: PromptLookup | None = None,
        console: Console | None = None,
    ) -> None:
        self._tenancy = tenancy
        self._limits = limits
        self._capturer = capturer
        self._about = about
        self._prompts, self._console = prompts, console
        self._running = UnderWay(limits.runs, "calls of precompute and forget")
        self._runs = ThreadPoolExecutor(RUNS_AT_ONCE, thread_name_prefix="semkv-run")
        self._asked = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="semkv-ask")
        self._stopping = threading.Event()
        self._store_asked_at, self._store_is_there = float("-inf"), False
        self._app = Starlette(
            routes=[
                Route(OWN + "info", _answered(self._info), methods=["GET"]),
                Route(OWN + "precompute", _answered(self._precompute), methods=["POST"]),
                Route(OWN + "forget", _answered(self._forget), methods=["POST"]),
                Route(OWN + "outcome", _answered(self._outcome), methods=["POST"]),
                Route(READY, self._ready, methods=["GET"]),
                *(console.routes(_answered) if console is not None else ()),
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, _VLLM: scope.get("app")}, receive, send)

    def close(self) -> None:
        """Stop what runs; finished chunks are kept."""
        self._stopping.set()
        for pool in (self._runs, self._asked):
            pool.shutdown(wait=True, cancel_futures=True)
        if self._console is not None:
            self._console.close()

    def _namespace(self, wished: Any) -> str:
        caller = CALLER.get()
        assert caller is not None, "the routes stand behind `front`"
        return self._tenancy.agreed(caller.namespace, wished)

    async def _capturer_of(self, request: Request, name: object) -> LLMCapturer:
        """The capturer of the model that a body names; the base model's where it names none."""
        if name is None:
            return self._capturer
        served = request.scope[_VLLM].state.openai_serving_models
        return await self._ask(lambda: capturer_of(self._capturer, served, name))

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asked, question)

    async def _info(self, request: Request) -> Response:
        namespace = self._namespace(request.query_params.get("namespace"))
        capturer = await self._capturer_of(request, request.query_params.get("model"))
        store, model = capturer.store, capturer.fingerprint
        return JSONResponse(
            {
                "fingerprint": model,
                "namespace": namespace,
                "store_id": await self._ask(lambda: cache_key(store, model, namespace)),
                **self._about,
            }
        )

    async def _ready(self, request: Request) -> Response:
        store_answers = await self._store_answers()
        told = {"gate": self._about["obstacle"] is None, "store": store_answers}
        return JSONResponse(told, status_code=200 if all(told.values()) else 503)

    async def _store_answers(self) -> bool:
        """Whether the index answers; asked once in `ASKED_S`, however many ask us."""
        if time.monotonic() > self._store_asked_at + ASKED_S:
            self._store_asked_at = time.monotonic()
            store, model = self._capturer.store, self._capturer.fingerprint
            try:
                asked = self._ask(lambda: store.last_change(model, DEFAULT_NAMESPACE))
                await asyncio.wait_for(asked, ANSWERED_S)
                self._store_is_there = True
            except (SemKVError, TimeoutError):
                self._store_is_there = False
        return self._store_is_there

    async def _forget(self, request: Request) -> Response:
        body = await body_of(request, {"sources"}, {"model", "namespace"})
        names = body["sources"]
        if not isinstance(names, list) or not all(map(is_text, names)):
            raise OptionError('sources is a list of names: {"sources": ["manual.md"]}')
        namespace = self._namespace(body.get("namespace"))
        capturer = await self._capturer_of(request, body.get("model"))
        store, model = capturer.store, capturer.fingerprint
        left = threading.Event()

        def work() -> int:
            removed = 0
            for first in range(0, len(names), FORGOTTEN_AT_ONCE):
                if left.is_set() or self._stopping.is_set():
                    break
                began = time.monotonic()
                some = names[first : first + FORGOTTEN_AT_ONCE]
                removed += forget_sources(store, model, namespace, some)
                if first + FORGOTTEN_AT_ONCE < len(names):
                    left.wait(RESTS * (time.monotonic() - began))
            return removed

        with self._running.one(namespace), _leaving(request, left):
            loop = asyncio.get_running_loop()
            removed = await loop.run_in_executor(self._runs, work)
        return JSONResponse({"removed": removed})

    async def _outcome(self, request: Request) -> Response:
        body = await body_of(request, {"explored", "correct"}, {"model", "namespace"})
        correct, explored = body["correct"], explored_of(body["explored"])
        if not isinstance(correct, bool):
            raise OptionError('an outcome is {"explored": …, "correct": true or false}')
        if (prompts := self._prompts) is None:
            raise OptionError("the server was started without --prompt-cache")
        capturer = await self._capturer_of(request, body.get("model"))
        # Whatever namespace stands in the report, outcomes are told of the tenant's own prompts.
        own = replace(explored, namespace=self._namespace(body.get("namespace")))
        noted = await self._ask(lambda: prompts.cascade_of(capturer).record(own, correct=correct))
        return JSONResponse({"noted": noted})

    async def _precompute(self, request: Request) -> Response:
        body = await body_of(request, {"documents"}, {"model", "namespace", "prefix", "context"})
        documents = documents_of(body["documents"])
        prefix = body.get("prefix") or ""
        if not is_text(prefix):
            raise OptionError("prefix is a text")
        namespace = self._namespace(body.get("namespace"))
        context = body.get("context", DEFAULT_CONTEXT)
        if not isinstance(context, list | tuple) or not all(map(is_text, context)):
            raise OptionError('context is a list of modes: ["prefix", "left"]')
        modes = context_modes(context)
        capturer = await self._capturer_of(request, body.get("model"))
        room = await self._ask(lambda: self._room(capturer, namespace, dict(documents).keys()))
        held = ExitStack()  # until the run has ended, whoever ends it
        held.enter_context(self._running.one(namespace))

        def compute(tell: OnProgress) -> PrecomputeResult:
            return precompute_texts(
                capturer,
                documents,
                namespace=namespace,
                prefix=prefix,
                context=modes,
                on_progress=tell,
            )

        def check(progress: PrecomputeProgress) -> None:
            if self._stopping.is_set():
                raise SemKVError("the run was stopped")
            if progress.bytes > room:
                raise LimitError(
                    f"the namespace may store {self._limits.namespace_bytes} bytes, which it has now"
                )

        events = start_run(self._runs, compute, check, held.close)
        return StreamingResponse(events, media_type="text/event-stream")

    def _room(self, capturer: LLMCapturer, namespace: str, names: Set[str]) -> float:
        """The bytes that a namespace may still store.

        Raises:
            LimitError: it may have no more sources, or no more bytes.
        """
        store, model, limits = capturer.store, capturer.fingerprint, self._limits
        if limits.namespace_sources is not None:
            there = {(one.model, one.name) for one in store.sources(namespace=namespace)}
            if len(there | {(model, name) for name in names}) > limits.namespace_sources:
                raise LimitError(
                    f"the namespace may have {limits.namespace_sources} sources and has {len(there)}:"
                    " remove some"
                )
        if limits.namespace_bytes is None:
            return float("inf")
        room = limits.namespace_bytes - sum(stats.bytes for stats in store.stats(namespace))
        if room <= 0:
            raise LimitError(f"the namespace may store {limits.namespace_bytes} bytes: remove some")
        return room


def _answered(handler: Handler) -> Handler:
    """`handler`, with its errors as answers."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except OptionError as error:
            return _failure(error, 400)
        except LimitError as error:
            return _failure(error, 429)
        except SemKVError as error:
            return _failure(error, 500)

    return answered


@contextmanager
def _leaving(request: Request, left: threading.Event) -> Iterator[None]:
    """While it is entered, `left` is set once the client has gone."""

    async def watch() -> None:
        while not await request.is_disconnected():
            await asyncio.sleep(LEFT_POLL_SECONDS)
        left.set()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        left.set()
        watching.cancel()


def _failure(error: SemKVError, status: int) -> JSONResponse:
    fault = {"message": str(error), "type": type(error).__name__, "code": status}
    return JSONResponse({"error": fault}, status_code=status)
