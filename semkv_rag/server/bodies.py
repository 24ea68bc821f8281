"""The bodies of requests to our own routes, checked."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from semkv_rag.errors import OptionError
from semkv_rag.report import Explored
from semkv_rag.unicode_text import is_unicode


async def body_of(request: Request, needed: set[str], optional: set[str]) -> dict[str, Any]:
    """The request's JSON object.

    Raises:
        OptionError: it is none, or lacks a field, or has one that is unknown.
    """
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise OptionError(f"the request is not JSON: {error}") from error
    if not isinstance(body, dict) or not needed <= body.keys() <= needed | optional:
        raise OptionError(
            f"the request is a JSON object with {', '.join(sorted(needed))}"
            f" and, if wanted, {', '.join(sorted(optional))}"
        )
    return body


def is_text(value: Any) -> bool:
    """Whether a value out of JSON is a text. Halves of surrogate pairs, which JSON allows, are none."""
    return isinstance(value, str) and is_unicode(value)


def explored_of(given: Any) -> Explored:
    try:
        explored = Explored(**given)
    except TypeError as error:
        raise OptionError("explored is what the request's report has there") from error
    similarity = explored.similarity
    texts = (explored.namespace, explored.donor, explored.layer, explored.encoder)
    sound = type(similarity) in (int, float) and -1.01 < similarity < 1.01
    if not sound or not all(map(is_text, texts)):
        raise OptionError("explored is what the request's report has there")
    return explored


def documents_of(given: Any) -> list[tuple[str, list[str]]]:
    return [_document(document) for document in (given if isinstance(given, list) else [None])]


def _document(given: Any) -> tuple[str, list[str]]:
    match given:
        case {"name": str(name), "chunks": [*chunks]}:
            if is_text(name) and all(map(is_text, chunks)):
                return name, chunks
    raise OptionError('documents is a list of {"name": "…", "chunks": ["text", …]}')
