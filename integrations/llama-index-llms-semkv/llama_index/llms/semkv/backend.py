"""What answers a `SemKV`: an engine in this process (`local`) or a server (`remote`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict


class Message(TypedDict):
    """A chat message, as chat templates and OpenAI's API take it."""

    role: str
    content: str


# Text goes to the model as it is, messages through the model's chat template.
Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Part:
    """An answer, or in a stream the part of it that is new.

    Attributes:
        text: the generated text.
        report: the reuse report as plain JSON values. In a stream it comes with the last part; None
            when the server does not send one.
        raw: what is known of the request, `usage` among it; in a stream in the last part.
    """

    text: str
    report: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] | None = None


class Backend(Protocol):
    """A model that answers. Used from any thread and any event loop.

    Attributes:
        model_name: for metadata and logs.
        context_window: tokens of prompt and answer together.
        has_chat_template: whether messages can be answered.

    The four methods take vLLM's sampling parameters and the reuse options this request sets itself.
    Streams check them before they return.

    Raises:
        OptionError: a parameter cannot be used, or the prompt is too long.
        EngineError: the engine or the server does not answer.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def context_window(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    def answer(
        self, prompt: Prompt, sampling: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part: ...

    async def aanswer(
        self, prompt: Prompt, sampling: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part: ...

    def stream(
        self, prompt: Prompt, sampling: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Generator[Part, None, None]: ...

    async def astream(
        self, prompt: Prompt, sampling: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> AsyncGenerator[Part, None]: ...
