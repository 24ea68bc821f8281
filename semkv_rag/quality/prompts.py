"""Prompts out of passages and a question, by a template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv_rag.errors import OptionError
from semkv_rag.quality.questions import Passage

CONTEXT, QUESTION = "{context}", "{question}"
DEFAULT_TEMPLATE = "{context}\n\nQuestion: {question}\nAnswer:"


@dataclass(frozen=True, slots=True)
class Template:
    """How a prompt is made.

    Attributes:
        text: with `{context}`, where the passages go, an empty line between them, and `{question}`.
        chat: the prompt is a user's message, for the model's chat template.

    Raises:
        OptionError: it lacks one of the two, or has one twice.
    """

    text: str = DEFAULT_TEMPLATE
    chat: bool = False

    def __post_init__(self) -> None:
        for place in (CONTEXT, QUESTION):
            if self.text.count(place) != 1:
                raise OptionError(f"the template has to hold {place} once")

    @property
    def prefix(self) -> str:
        """What all its prompts start with, or their user's messages, to precompute passages behind it."""
        return _split(self.text, (CONTEXT, QUESTION))[0]

    def prompt(self, passages: Sequence[Passage], question: str) -> str | list[dict[str, Any]]:
        """The prompt: a text, or one message of it."""
        filled = {CONTEXT: "\n\n".join(map(str, passages)), QUESTION: question}
        # In one go: a passage may speak of {question}.
        before, first, rest = _split(self.text, filled)
        between, second, behind = _split(rest, filled)
        text = "".join((before, filled[first], between, filled[second], behind))
        return [{"role": "user", "content": text}] if self.chat else text


def _split(text: str, places: Sequence[str] | dict[str, str]) -> tuple[str, str, str]:
    """What stands before the first of `places` in `text`, that place, and what stands behind it."""
    first = min((place for place in places if place in text), key=text.index)
    before, _, behind = text.partition(first)
    return before, first, behind
