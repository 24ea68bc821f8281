"""Files of questions: a JSON list, or a JSON object in each line; all checked before vLLM is started.

{"prompt": "the whole prompt", "answers": ["…"]}                     retrieval is the caller's
{"prompt": [{"role": "user", "content": "…"}]}                       the same, for the chat template
{"ctxs": [{"title": "…", "text": "…"}], "question": "…", "answers": ["…"]}   MuSiQue's form
{"question": "…", "answer": "…"}                                     passages are taken from the store

Other fields are passed over: such files have more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv_rag.errors import OptionError
from semkv_rag.messages import text_messages

_NEWLINE = "\n"
_IMAGES = "prompts with images are not compared"


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that stands in a prompt."""

    text: str
    title: str = ""

    def __str__(self) -> str:
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a file.

    Attributes:
        name: the file and the line, for people; the column too, of a line's second question.
        prompt: text that goes to the model as it is, or messages for its chat template; None when it
            is made of the rest.
        text: the question.
        passages: what is put before it; empty when they are to be found in the store.
        answers: those that are right, if any are known.
    """

    name: str
    prompt: str | Sequence[Mapping[str, Any]] | None = None
    text: str = ""
    passages: tuple[Passage, ...] = ()
    answers: tuple[str, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """The questions of a file.

    Raises:
        OptionError: it cannot be read, has none, or one cannot be used; the message names its line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not read: {error}") from error
    questions: list[Question] = []
    for position, values in _entries(path, text):
        name = f"{path}:{text.count(_NEWLINE, 0, position) + 1}"
        if questions and questions[-1].name.startswith(name):  # the same line
            name += f":{position - text.rfind(_NEWLINE, 0, position)}"
        try:
            questions.append(_question(name, values))
        except OptionError as error:
            raise OptionError(f"{name}: {error}") from error
    if not questions:
        raise OptionError(f"{path} holds no question")
    return questions


def _entries(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The file's objects and where they begin."""
    decoder, position = json.JSONDecoder(), _skip(text, 0)
    in_list = text[position : position + 1] == "["
    position += in_list
    try:
        while (position := _skip(text, position)) < len(text):
            if in_list and text[position] == "]":
                if _skip(text, position + 1) < len(text):
                    raise json.JSONDecodeError("there is something behind the list", text, position)
                return
            entry, end = decoder.raw_decode(text, position)
            yield position, entry
            position = _skip(text, end)
            if in_list and text[position : position + 1] == ",":
                position += 1
            elif in_list and text[position : position + 1] != "]":
                raise json.JSONDecodeError("a comma or ] is missing", text, position)
    except json.JSONDecodeError as error:
        raise OptionError(f"{path}:{error.lineno}: {error.msg}") from error
    if in_list:
        raise OptionError(f"{path}:{text.count(_NEWLINE) + 1}: the list does not end")


def _skip(text: str, position: int) -> int:
    """The position of the first character from `position` on that is not blank."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _question(name: str, values: Any) -> Question:
    if not isinstance(values, dict):
        raise OptionError('write an object, such as {"prompt": "…"} or {"question": "…"}')
    answers = _answers(values)
    if "prompt" in values:
        return Question(name, prompt=_prompt(values["prompt"]), answers=answers)
    if "messages" in values:
        return Question(name, prompt=text_messages(values["messages"], _IMAGES), answers=answers)
    text = values.get("question")
    if not isinstance(text, str) or not text.strip():
        raise OptionError("give a prompt, messages or a question, as a text that is not empty")
    return Question(name, text=text, passages=_passages(values.get("ctxs", [])), answers=answers)


def _answers(values: Mapping[str, Any]) -> tuple[str, ...]:
    given = values.get("answers", values.get("answer"))
    given = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise OptionError("answers: give a list of texts")
    return tuple(given)


def _passages(values: Any) -> tuple[Passage, ...]:
    if not isinstance(values, list):
        raise OptionError('ctxs: give a list of {"title": "…", "text": "…"}')
    passages = []
    for one in values:
        text = one.get("text") if isinstance(one, dict) else None
        title = one.get("title") or "" if isinstance(one, dict) else None
        if not isinstance(text, str) or not text or not isinstance(title, str):
            raise OptionError('ctxs: each is {"title": "…", "text": "…"}, the title may be missing')
        passages.append(Passage(text, title))
    return tuple(passages)


def _prompt(value: Any) -> str | Sequence[Mapping[str, Any]]:
    if isinstance(value, list):
        return text_messages(value, _IMAGES)
    if not isinstance(value, str) or not value:
        raise OptionError("prompt: give a text or messages")
    return value
