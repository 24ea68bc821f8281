"""Answers from a server: `semkv serve`, or any other vLLM server, which then reuses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import openai
from openai.types import Model

from semkv_rag.corpus import (
    DEFAULT_CONTEXT,
    ContextMode,
    Failure,
    OnProgress,
    PrecomputeProgress,
    PrecomputeResult,
)
from semkv_rag.errors import EngineError, OptionError
from semkv_rag.llm.answers import StreamedAnswer, whole_part
from semkv_rag.llm.fields import before, request_fields
from semkv_rag.llm.types import Part, Prompt
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD


class RemoteBackend:
    """A server's model as a `Backend`.

    Args:
        base_url: the server's address, up to and with `/v1`.
        api_key: the server's key; None when it wants none.
        model: one of the server's models; None for its first.
        timeout: of a request, in seconds; of `store_texts`, the longest silence.
        max_retries: how often a server that does not answer is asked again.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._root = self._base_url.removesuffix("/v1")
        self._wanted = model
        settings: dict[str, Any] = {
            "base_url": self._base_url,
            "api_key": api_key or "none",  # the client does not start without one
            "timeout": timeout,
            "max_retries": max_retries,
        }
        self._settings = settings
        self._client = openai.OpenAI(**settings)
        # A client's connections belong to the event loop they were made in.
        self._async_clients: dict[asyncio.AbstractEventLoop, openai.AsyncOpenAI] = {}
        self._lock = threading.Lock()

    @cached_property
    def _cards(self) -> list[Model]:
        with self._errors():
            return list(self._client.models.list())

    @cached_property
    def _card(self) -> Model:
        for card in self._cards:
            if self._wanted in (None, card.id):
                return card
        there = ", ".join(card.id for card in self._cards)
        raise OptionError(f"{self._base_url} has no model {self._wanted}: it has {there}")

    @cached_property
    def _info(self) -> dict[str, Any] | None:
        return self._ask_info()

    def _ask_info(self, namespace: str | None = None) -> dict[str, Any] | None:
        """What `semkv serve` tells of itself; None from another server."""
        with self._errors():
            try:
                return self._client.get(
                    f"{self._root}/semkv/v1/info",
                    cast_to=dict[str, Any],
                    options={"params": self._params(namespace)},
                )
            except openai.NotFoundError:
                return None

    def _params(self, namespace: str | None) -> dict[str, str]:
        """What our own routes are told: the model or adapter, and the tenant, where named."""
        given = {"model": self._wanted, "namespace": namespace}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def model_name(self) -> str:
        return self._card.id

    @property
    def context_window(self) -> int:
        own = self._card.model_extra or {}
        # An adapter's card names the model that it belongs to, and no window.
        parent = next((card for card in self._cards if card.id == own.get("parent")), self._card)
        window = own.get("max_model_len") or (parent.model_extra or {}).get("max_model_len")
        if not isinstance(window, int):
            raise EngineError(f"{self._base_url} does not tell its context window: is it vLLM?")
        return window

    @cached_property
    def has_chat_template(self) -> bool:
        """Whether the model has one. A plain vLLM without one refuses to tokenize a message."""
        if self._info is not None:
            return bool(self._info["has_chat_template"])
        messages = [{"role": "user", "content": "?"}]
        try:
            self._tokenize(messages=messages)
        except OptionError:
            return False
        return True

    @property
    def supports_tools(self) -> bool:
        """A plain vLLM does not tell: it refuses the request if it does not."""
        return self._info is None or bool(self._info["supports_tools"])

    @property
    def supports_images(self) -> bool:
        """As `supports_tools`."""
        return self._info is None or bool(self._info["supports_images"])

    def count_tokens(self, text: str) -> int:
        return int(self._tokenize(prompt=text, add_special_tokens=False)["count"])

    def prefix_of(self, prompt: Prompt, marker: str) -> str:
        if isinstance(prompt, str):
            return before(marker, prompt)
        tokens = self._tokenize(messages=list(prompt))["tokens"]
        with self._errors():
            url, body = f"{self._root}/detokenize", {"model": self.model_name, "tokens": tokens}
            text = self._client.post(url, body=body, cast_to=dict[str, Any])["prompt"]
        return before(marker, text)

    def answer(self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]) -> Part:
        request = self._request(prompt, fields, reuse)
        with self._errors():
            response = _endpoint(self._client, prompt).create(**request)
        return whole_part(response.to_dict())

    async def aanswer(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part:
        request = await asyncio.to_thread(self._request, prompt, fields, reuse)
        with self._errors():
            response = await _endpoint(self._async_client(), prompt).create(**request)
        return whole_part(response.to_dict())

    def stream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Generator[Part, None, None]:
        request = self._request(prompt, fields, reuse)
        with self._errors():
            chunks = _endpoint(self._client, prompt).create(**request, **_STREAMED)

        def parts() -> Generator[Part, None, None]:
            answer = StreamedAnswer()
            with self._errors(), chunks:
                for chunk in chunks:
                    if (part := answer.take(chunk.to_dict())) is not None:
                        yield part
            yield answer.last()

        return parts()

    async def astream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> AsyncGenerator[Part, None]:
        request = await asyncio.to_thread(self._request, prompt, fields, reuse)
        with self._errors():
            chunks = await _endpoint(self._async_client(), prompt).create(**request, **_STREAMED)

        async def parts() -> AsyncGenerator[Part, None]:
            answer = StreamedAnswer()
            with self._errors():
                async with chunks:
                    async for chunk in chunks:
                        if (part := answer.take(chunk.to_dict())) is not None:
                            yield part
            yield answer.last()

        return parts()

    def store_texts(
        self,
        documents: Iterable[tuple[str, Sequence[str]]],
        *,
        namespace: str | None = None,
        prefix: str = "",
        context: Sequence[ContextMode] = DEFAULT_CONTEXT,
        on_progress: OnProgress | None = None,
    ) -> PrecomputeResult:
        body = {
            "documents": [{"name": name, "chunks": list(texts)} for name, texts in documents],
            "prefix": prefix,
            "context": list(context),
            **self._params(namespace),
        }
        with self._errors(), self._ours():
            events = self._client.post(
                f"{self._root}/semkv/v1/precompute",
                body=body,
                cast_to=dict[str, Any],
                stream=True,
                stream_cls=openai.Stream[dict[str, Any]],
            )
            with events:
                for told in events:
                    if "result" in told:
                        return _result(told["result"])
                    if on_progress is not None:
                        on_progress(PrecomputeProgress(**told["progress"]))
        raise EngineError(f"{self._root} ended before it had stored everything: is it stopping?")

    def forget(self, sources: Iterable[str], *, namespace: str | None = None) -> int:
        body = {"sources": list(sources), **self._params(namespace)}
        with self._errors(), self._ours():
            url = f"{self._root}/semkv/v1/forget"
            answer = self._client.post(url, body=body, cast_to=dict[str, Any])
        return int(answer["removed"])

    def fingerprint(self) -> str:
        return str(self._served_info["fingerprint"])

    def store_id(self, *, namespace: str | None = None) -> str:
        # Asked anew each time: it tells the namespace's last change.
        if (info := self._ask_info(namespace)) is None:
            raise self._not_ours()
        return str(info["store_id"])

    @property
    def _served_info(self) -> dict[str, Any]:
        if self._info is None:
            raise self._not_ours()
        return self._info

    def _async_client(self) -> openai.AsyncOpenAI:
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._async_clients:
                for ended in [loop for loop in self._async_clients if loop.is_closed()]:
                    del self._async_clients[ended]
                self._async_clients[loop] = openai.AsyncOpenAI(**self._settings)
            return self._async_clients[loop]

    def _tokenize(self, **what: Any) -> dict[str, Any]:
        with self._errors():
            url, body = f"{self._root}/tokenize", {"model": self.model_name, **what}
            return self._client.post(url, body=body, cast_to=dict[str, Any])

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Says what to start where the server has no such route."""
        try:
            yield
        except openai.NotFoundError as error:
            raise self._not_ours() from error

    def _not_ours(self) -> EngineError:
        return EngineError(f"{self._root} stores nothing: start the server with `semkv serve`")

    def _request(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of the client's `create`. The first time it asks the server for its model."""
        # vLLM takes its sampling parameters by their names beside OpenAI's, so all go in one way.
        extra = request_fields(prompt, fields)
        if reuse:
            extra[TRANSFER_FIELD] = {PARAMS_KEY: dict(reuse)}
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return {"model": self.model_name, **given, "extra_body": extra}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """The clients' errors as this package's."""
        try:
            yield
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise OptionError(f"{self._base_url} refuses the request: {error.message}") from error
        except openai.OpenAIError as error:
            raise EngineError(f"{self._base_url} does not answer: {error}") from error


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _endpoint(client: openai.OpenAI | openai.AsyncOpenAI, prompt: Prompt) -> Any:
    return client.completions if isinstance(prompt, str) else client.chat.completions


def _result(fields: Mapping[str, Any]) -> PrecomputeResult:
    failures = [Failure(**failure) for failure in fields["failures"]]
    names = {name: tuple(fields[name]) for name in ("skipped", "empty")}
    return PrecomputeResult(**{**fields, **names, "failures": failures})
