"""`semkv serve --console`: a page that shows what reuse does, to each tenant of its own namespace.

The page itself holds nothing: it asks for a key and fetches the rest with it, through `front` like any
other client. Names, prompts and reports reach it as JSON, and are put into the page as text. What waits
for the store waits in threads of the console's own, none of which a request to the model ever needs.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.resources import files
from statistics import median
from typing import Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from semkv_rag.engine.caller import CALLER
from semkv_rag.engine.llm_capturer import LLMCapturer
from semkv_rag.engine.mapping import completed
from semkv_rag.engine.recent import RecentRequests, SeenRequest
from semkv_rag.errors import OptionError
from semkv_rag.server.bodies import body_of, is_text
from semkv_rag.server.tenants import CONSOLE, CONSOLE_PAGE
from semkv_rag.store import Pin, SourceInfo
from semkv_rag.token_map import TokenMap

T = TypeVar("T")

ASKED_AT_ONCE: Final = 2
SHOWN_DOCUMENTS: Final = 200
PAGE: Final = files("semkv_rag.server").joinpath("console.html").read_text(encoding="utf-8")


class Console:
    """What the page asks for.

    Args:
        recent: the requests that were answered last.
        obstacle: why prompts are answered without reuse, or None.
        changes: whether documents may be pinned and deleted.
    """

    def __init__(
        self,
        capturer: LLMCapturer,
        recent: RecentRequests,
        model: str,
        obstacle: str | None,
        *,
        changes: bool,
    ) -> None:
        self._capturer, self._recent = capturer, recent
        self._model, self._obstacle, self._changes = model, obstacle, changes
        self._asked = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="semkv-console")

    def close(self) -> None:
        """End the threads; nothing is answered any more."""
        self._asked.shutdown(wait=True, cancel_futures=True)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._asked, question)

    def routes(self, answered: Callable[[Any], Any]) -> list[Route]:
        """Its routes.

        Args:
            answered: makes errors of a handler answers.
        """
        return [
            Route(CONSOLE_PAGE, self._page, methods=["GET"]),
            Route(CONSOLE + "state", answered(self._state), methods=["GET"]),
            Route(CONSOLE + "documents", answered(self._documents), methods=["GET"]),
            Route(CONSOLE + "request", answered(self._request), methods=["GET"]),
            Route(CONSOLE + "change", answered(self._change), methods=["POST"]),
        ]

    async def _page(self, request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        rules = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline';"
            " connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none';"
            " form-action 'none'"
        )
        headers = {"Content-Security-Policy": rules, "Cache-Control": "no-store"}
        return HTMLResponse(PAGE.replace("NONCE", nonce), headers=headers)

    async def _state(self, request: Request) -> Response:
        namespace = _namespace()
        store = self._capturer.store
        stats = await self._ask(lambda: store.stats(namespace))
        seen = self._recent.of(namespace)
        return JSONResponse(
            {
                "model": self._model,
                "namespace": namespace,
                "obstacle": self._obstacle,
                "changes": self._changes,
                "chunks": sum(one.chunks for one in stats),
                "bytes": sum(one.bytes for one in stats),
                "requests": [_request_fields(one) for one in seen],
                "outcomes": Counter(one.report.kv_cache for one in seen),
                "ttft_ms": {
                    kind: median(times)
                    for kind in ("hit", "miss", "skip")
                    if (times := [one.ttft_ms for one in seen if one.report.kv_cache == kind])
                },
            }
        )

    async def _documents(self, request: Request) -> Response:
        namespace, model, store = _namespace(), self._capturer.fingerprint, self._capturer.store
        wanted = request.query_params.get("name", "").lower()

        def find() -> dict[str, Any]:
            found = [one for one in store.sources(model, namespace) if wanted in one.name.lower()]
            shown = found[:SHOWN_DOCUMENTS]
            records = store.get(model, namespace, {id_ for one in shown for id_ in one.chunk_ids})

            def document_fields(one: SourceInfo) -> dict[str, Any]:
                own = [records[id_] for id_ in one.chunk_ids if id_ in records]
                return {
                    "name": one.name,
                    "chunks": len(one.chunk_ids),
                    "stored": len(own),
                    "bytes": sum(record.bytes for record in own),
                    "used_at": max((record.used_at for record in own), default=None),
                    "pinned": one.pinned,
                }

            return {"documents": [document_fields(one) for one in shown], "total": len(found)}

        return JSONResponse(await self._ask(find))

    async def _request(self, request: Request) -> Response:
        namespace = _namespace()
        number = request.query_params.get("number", "")
        seen = self._recent.get(namespace, int(number)) if number.isdecimal() else None
        if seen is None:
            return JSONResponse(
                {"error": {"message": "the request is not kept any more"}}, status_code=404
            )
        capturer = self._capturer
        shown = await self._ask(
            lambda: completed(
                seen.report.token_map or TokenMap(),
                seen.tokens.tolist(),
                capturer.tokenizer,
                capturer.store,
                capturer.fingerprint,
                namespace,
            )
        )
        return JSONResponse({"html": replace(seen.report, token_map=shown).to_html()})

    async def _change(self, request: Request) -> Response:
        body = await body_of(request, {"name", "do"}, set())
        name, do = body["name"], body["do"]
        if not self._changes:
            return JSONResponse(
                {"error": {"message": "start semkv serve with --console-changes"}}, status_code=403
            )
        if not is_text(name) or do not in ("pin", "unpin", "delete"):
            raise OptionError('a change is {"name": "a.md", "do": "pin", "unpin" or "delete"}')
        namespace, model, store = _namespace(), self._capturer.fingerprint, self._capturer.store
        pin = Pin(model=model, namespace=namespace, source=name)

        def change() -> None:
            if do == "pin":
                store.lifecycle.pin(pin)
            elif do == "unpin":
                store.lifecycle.unpin(pin)
            else:
                store.remove_source(model, namespace, name)

        await self._ask(change)
        return JSONResponse({"done": do})


def _namespace() -> str:
    caller = CALLER.get()
    assert caller is not None, "the routes stand behind `front`"
    return caller.namespace


def _request_fields(one: SeenRequest) -> dict[str, Any]:
    report = one.report
    return {
        "number": one.number,
        "ended_at": one.ended_at,
        "kv_cache": report.kv_cache,
        "reason": report.reason,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "exact_tokens": report.exact_tokens,
        "reused_tokens": report.reused_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "ttft_ms": one.ttft_ms,
        "latency_ms": one.latency_ms,
        "risk": report.risk,
    }
