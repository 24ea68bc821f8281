"""What every backend takes and gives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypedDict

from semkv_rag.corpus.context import DEFAULT_CONTEXT, ContextMode
from semkv_rag.corpus.progress import OnProgress, PrecomputeResult


class Function(TypedDict, total=False):
    """The function of a `ToolCall`; in a stream each part adds to `arguments`, a JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict, total=False):
    """A call the model wants made, in OpenAI's words; in a stream a delta, to be joined by index."""

    index: int
    id: str
    type: Literal["function"]
    function: Function


class Message(TypedDict, total=False):
    """A chat message, as OpenAI's API takes it: content is a text, content parts, or None."""

    role: str
    content: str | Sequence[Mapping[str, Any]] | None
    name: str
    tool_calls: Sequence[ToolCall]
    tool_call_id: str


# Text goes to the model as it is, messages through the model's chat template.
Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Part:
    """An answer, or in a stream the part of it that is new.

    Attributes:
        text: the generated text.
        tool_calls: the calls the model wants made; in a stream OpenAI's deltas, joined by index.
        logprobs: in OpenAI's shape, when they were asked for.
        report: the reuse report as plain JSON values. In a stream it comes with the last part; None
            when the server does not send one.
        raw: what is known of the request: `model`, `finish_reason`, `usage`, and where they are
            known `id`, `ttft_ms` and `latency_ms`; in a stream in the last part.
    """

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: Any = None
    report: Mapping[str, Any] | None = None
    raw: Mapping[str, Any] | None = None


class Backend(Protocol):
    """A model that answers. Used from any thread and any event loop.

    Attributes:
        model_name: for metadata and logs.
        context_window: tokens of prompt and answer together.
        has_chat_template: whether messages can be answered.
        supports_tools: whether the model's own tool calls are understood, so that
            `tool_choice="auto"` works. Named and required ones work without.
        supports_images: whether messages may hold images.

    The four methods that answer take `fields`, a flat mapping of any fields of OpenAI's request and
    of vLLM's sampling parameters, and `reuse`, the reuse options this request sets itself. Streams
    check both before they return.

    Raises:
        OptionError: a field or an option cannot be used, or the prompt is too long.
        EngineError: the engine or the server does not answer.
    """

    @property
    def model_name(self) -> str: ...

    @property
    def context_window(self) -> int: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def supports_tools(self) -> bool: ...

    @property
    def supports_images(self) -> bool: ...

    def count_tokens(self, text: str) -> int:
        """How many tokens the model makes of a text, without those it puts before every prompt."""
        ...

    def prefix_of(self, prompt: Prompt, marker: str) -> str:
        """What the model sees of a prompt before a text in it: the `prefix` of `store_texts`.

        Messages go through the chat template first. Empty where the text is not found.

        Args:
            prompt: as it will be asked, `marker` standing where the retrieved texts will.

        Raises:
            OptionError: the messages cannot be put through the template.
            EngineError: the engine or the server does not answer.
        """
        ...

    def answer(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part: ...

    async def aanswer(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Part: ...

    def stream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> Generator[Part, None, None]: ...

    async def astream(
        self, prompt: Prompt, fields: Mapping[str, Any], reuse: Mapping[str, Any]
    ) -> AsyncGenerator[Part, None]: ...

    def store_texts(
        self,
        documents: Iterable[tuple[str, Sequence[str]]],
        *,
        namespace: str | None = None,
        prefix: str = "",
        context: Sequence[ContextMode] = DEFAULT_CONTEXT,
        on_progress: OnProgress | None = None,
    ) -> PrecomputeResult:
        """Store the KV of texts that are cut already, as (source name, its chunks' texts).

        As `semkv_rag.corpus.precompute_texts`; without a namespace in the one that requests without
        one use.
        """
        ...

    def forget(self, sources: Iterable[str], *, namespace: str | None = None) -> int:
        """Remove sources and the chunks that no other source has; how many sources were there."""
        ...

    def fingerprint(self) -> str:
        """The model's fingerprint: it differs where anything that changes KV does."""
        ...

    def store_id(self, *, namespace: str | None = None) -> str:
        """An id of the store and a namespace, the default one where None: for the keys of caches."""
        ...
