"""OpenAI's responses as `Part`s: those of a server and those of this process are the same JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from semkv_rag.llm.types import Part, ToolCall
from semkv_rag.wire import PARAMS_KEY, TRANSFER_FIELD


def whole_part(response: Mapping[str, Any]) -> Part:
    """The answer of a whole response."""
    choice = response["choices"][0]
    raw = {
        "model": response.get("model"),
        "id": response.get("id"),
        "finish_reason": choice.get("finish_reason"),
        "usage": _usage(response.get("usage")),
    }
    return replace(_new(choice), report=_report(response), raw=raw)


@dataclass(slots=True)
class StreamedAnswer:
    """Turns a stream's chunks into parts, and keeps what belongs into the last one."""

    _report: Mapping[str, Any] | None = None
    _raw: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: Mapping[str, Any]) -> Part | None:
        """The part that a chunk brings, if any."""
        self._report = _report(chunk) or self._report
        for name in ("model", "id"):
            if chunk.get(name):
                self._raw.setdefault(name, chunk[name])
        if chunk.get("usage"):
            self._raw["usage"] = _usage(chunk["usage"])
        if not chunk.get("choices"):
            return None
        choice = chunk["choices"][0]
        if choice.get("finish_reason") is not None:
            self._raw["finish_reason"] = choice["finish_reason"]
        part = _new(choice)
        return part if part.text or part.tool_calls or part.logprobs else None

    def last(self) -> Part:
        """What ends the stream: no text, the report and what is known of the request."""
        return Part("", report=self._report, raw=self._raw)


def _new(choice: Mapping[str, Any]) -> Part:
    """What a choice says, of whichever of the four shapes it is."""
    message = choice.get("message") or choice.get("delta")
    if message is None:
        return Part(choice.get("text") or "", logprobs=choice.get("logprobs"))
    calls = [_call(number, call) for number, call in enumerate(message.get("tool_calls") or ())]
    return Part(message.get("content") or "", _joined(calls), choice.get("logprobs"))


def _call(number: int, call: Mapping[str, Any]) -> ToolCall:
    """A call without what it does not say; a whole answer's calls get the indexes deltas have."""
    said: Any = {"index": number, **_said(call)}
    if "function" in said:
        said["function"] = _said(said["function"])
    return cast(ToolCall, said)


def _joined(deltas: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """One for each index.

    Where several tokens come at once, a chunk of vLLM's may begin a call and go on with it. LangChain
    joins what stands in different chunks, but not in one.
    """
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        call = calls.get(delta["index"])
        if call is not None:
            begun, more = call.get("function", {}), delta.get("function", {})
            arguments = begun.get("arguments", "") + more.get("arguments", "")
            function: Any = {**more, **begun, "arguments": arguments}
            delta = cast(ToolCall, {**delta, **call, "function": function})
        calls[delta["index"]] = delta
    return tuple(calls.values())


def _said(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _report(response: Mapping[str, Any]) -> Mapping[str, Any] | None:
    report = (response.get(TRANSFER_FIELD) or {}).get(PARAMS_KEY)
    return report if isinstance(report, Mapping) else None


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    return _said(usage or {})
