"""Answers from a server: `semkv serve`, or any other vLLM server, which then reuses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import openai
from openai.types import Model

from semkv_rag.backend.types import Part, Prompt
from semkv_rag.corpus import OnProgress, PrecomputeResult
from semkv_rag.errors import EngineError, OptionError

# The field that carries options there and the report back, and our key in it.
TRANSFER_FIELD = "kv_transfer_params"
PARAMS_KEY = "semkv"


class RemoteBackend:
    """A server's model as a `Backend`.

    Args:
        base_url: the server's address, up to and with `/v1`.
        api_key: the server's key; None when it wants none.
        model: one of the server's models; None for its first.
        timeout: of a request, in seconds.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        model: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._wanted = model
        settings: dict[str, Any] = {
            "base_url": self._base_url,
            "api_key": api_key or "none",  # the client does not start without one
            "timeout": timeout,
        }
        self._client = openai.OpenAI(**settings)
        self._async_client = openai.AsyncOpenAI(**settings)

    @cached_property
    def _card(self) -> Model:
        with self._errors():
            cards = list(self._client.models.list())
        for card in cards:
            if self._wanted in (None, card.id):
                return card
        there = ", ".join(card.id for card in cards)
        raise OptionError(f"{self._base_url} has no model {self._wanted}: it has {there}")

    @property
    def model_name(self) -> str:
        return self._card.id

    @property
    def context_window(self) -> int:
        window = (self._card.model_extra or {}).get("max_model_len")
        if not isinstance(window, int):
            raise EngineError(f"{self._base_url} does not tell its context window: is it vLLM?")
        return window

    @cached_property
    def has_chat_template(self) -> bool:
        """Found out by having the server tokenize a message, which it refuses without a template."""
        url = self._base_url.removesuffix("/v1") + "/tokenize"
        messages = [{"role": "user", "content": "?"}]
        with self._errors():
            try:
                self._client.post(
                    url, cast_to=object, body={"model": self.model_name, "messages": messages}
                )
            except openai.BadRequestError:
                return False
        return True

    @property
    def supports_tools(self) -> bool:
        return False

    @property
    def supports_images(self) -> bool:
        return False

    def count_tokens(self, text: str) -> int:
        raise NotImplementedError

    def hint(self, texts: Sequence[str], *, namespace: str | None = None) -> None:
        """Nothing: a server that was not asked yet finds the files no sooner for it."""

    def store_texts(
        self,
        documents: Iterable[tuple[str, Sequence[str]]],
        *,
        namespace: str | None = None,
        head: str = "",
        on_progress: OnProgress | None = None,
    ) -> PrecomputeResult:
        raise NotImplementedError

    def forget(self, sources: Iterable[str], *, namespace: str | None = None) -> int:
        raise NotImplementedError

    def fingerprint(self) -> str:
        raise NotImplementedError

    def store_id(self) -> str:
        raise NotImplementedError

    def answer(self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]) -> Part:
        with self._errors():
            response = _endpoint(self._client, prompt).create(
                **self._request(prompt, fields, reuse)
            )
        return _whole(response)

    async def aanswer(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part:
        request = await asyncio.to_thread(self._request, prompt, fields, reuse)
        with self._errors():
            response = await _endpoint(self._async_client, prompt).create(**request)
        return _whole(response)

    def stream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Generator[Part, None, None]:
        request = self._request(prompt, fields, reuse)
        with self._errors():
            chunks = _endpoint(self._client, prompt).create(**request, **_STREAMED)

        def parts() -> Generator[Part, None, None]:
            end = _StreamEnd()
            with self._errors(), chunks:
                for chunk in chunks:
                    if text := end.take(chunk):
                        yield Part(text)
            yield end.part()

        return parts()

    async def astream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> AsyncGenerator[Part, None]:
        request = await asyncio.to_thread(self._request, prompt, fields, reuse)
        with self._errors():
            chunks = await _endpoint(self._async_client, prompt).create(**request, **_STREAMED)

        async def parts() -> AsyncGenerator[Part, None]:
            end = _StreamEnd()
            with self._errors():
                async with chunks:
                    async for chunk in chunks:
                        if text := end.take(chunk):
                            yield Part(text)
            yield end.part()

        return parts()

    def _request(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of the client's `create`. The first time it asks the server for its model."""
        # vLLM takes its sampling parameters by their names beside OpenAI's, so all go in one way.
        extra: dict[str, Any] = dict(fields)
        if reuse:
            extra[TRANSFER_FIELD] = {PARAMS_KEY: dict(reuse)}
        given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
        return {"model": self.model_name, **given, "extra_body": extra}

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """The client's errors as this package's."""
        try:
            yield
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise OptionError(f"{self._base_url} refuses the request: {error.message}") from error
        except openai.OpenAIError as error:
            raise EngineError(f"{self._base_url} does not answer: {error}") from error


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _endpoint(client: openai.OpenAI | openai.AsyncOpenAI, prompt: Prompt) -> Any:
    return client.completions if isinstance(prompt, str) else client.chat.completions


def _report(response: Any) -> Mapping[str, Any] | None:
    report = ((response.model_extra or {}).get(TRANSFER_FIELD) or {}).get(PARAMS_KEY)
    return report if isinstance(report, Mapping) else None


def _whole(response: Any) -> Part:
    choice = response.choices[0]
    text = choice.message.content if hasattr(choice, "message") else choice.text
    return Part(text or "", report=_report(response), raw=response.model_dump())


@dataclass(slots=True)
class _StreamEnd:
    """What a stream's chunks say beside their text, for its last part."""

    report: Mapping[str, Any] | None = None
    raw: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: Any) -> str:
        """Book one chunk; returns its text."""
        self.report = _report(chunk) or self.report
        if chunk.usage is not None:
            self.raw |= {"model": chunk.model, "usage": chunk.usage.model_dump()}
        if not chunk.choices:
            return ""
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self.raw["finish_reason"] = choice.finish_reason
        text = choice.delta.content if hasattr(choice, "delta") else choice.text
        return text or ""

    def part(self) -> Part:
        return Part("", report=self.report, raw=self.raw)
