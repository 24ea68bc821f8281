"""The reuse report in answers that are streamed, where vLLM leaves it out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from semkv_rag.wire import TRANSFER_FIELD

_EVENT = b"data: {"
_FINISH = b'"finish_reason":"'


def with_report(chunk: dict[str, Any], report: Mapping[str, Any] | None) -> dict[str, Any]:
    """A chunk of an answer; with the report when a choice ends in it.

    Clients read `chunk.choices[0]` of every chunk, so the report gets no chunk of its own.

    Args:
        report: the request's `kv_transfer_params`, once they are known: before its last choice ends.
    """
    if report is None or not _finishes(chunk):
        return chunk
    return {**chunk, TRANSFER_FIELD: report}


def events_with_report(body: bytes, report: Mapping[str, Any] | None) -> bytes:
    """Whole server-sent events; with the report in the chunk in which a choice ends, if it is here."""
    if report is None or _FINISH not in body:
        return body
    return b"\n\n".join(_event(event, report) for event in body.split(b"\n\n"))


def _event(event: bytes, report: Mapping[str, Any]) -> bytes:
    if not event.startswith(_EVENT) or _FINISH not in event:
        return event
    try:
        chunk = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return event
    if not _finishes(chunk):
        return event
    return b"data: " + json.dumps(with_report(chunk, report)).encode()


def _finishes(chunk: Mapping[str, Any]) -> bool:
    choices = chunk.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") for choice in choices
    )
