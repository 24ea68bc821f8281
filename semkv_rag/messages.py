"""Chat messages out of a user's file, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from semkv_rag.errors import OptionError


def text_messages(values: Any, images: str) -> Sequence[Mapping[str, Any]]:
    """`values`, when they are messages of text alone.

    Args:
        images: in words, why nothing but text will do.

    Raises:
        OptionError: they are not.
    """
    if not isinstance(values, list) or not values:
        raise OptionError("messages: give a list with at least one")
    for message in values:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise OptionError("messages: each is an object with a role and content")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            raise OptionError(f"messages: {images}")
        if any(not isinstance(part.get("text"), str) for part in parts):
            raise OptionError("messages: a part of type text has its text")
    return values
