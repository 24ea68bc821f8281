"""Files of prompts: a JSON object in each line, all of it checked before anything is computed.

{"prompt": "…"}
{"messages": [{"role": "user", "content": "…"}], "namespace": "a", "source_version": "3"}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv_rag.config import DEFAULT_NAMESPACE, check_namespace
from semkv_rag.errors import OptionError
from semkv_rag.messages import text_messages
from semkv_rag.unicode_text import is_unicode

_FIELDS = ("prompt", "messages", "namespace", "source_version")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a file.

    Attributes:
        name: the file and the line, for people.
        prompt: text that goes to the model as it is, or messages for its chat template.
        namespace: the tenant it belongs to.
        source_version: only requests with the same one may use it.
    """

    name: str
    prompt: str | Sequence[Mapping[str, Any]]
    namespace: str
    source_version: str


def read_prompts(path: Path, namespace: str = DEFAULT_NAMESPACE) -> list[PromptLine]:
    """The prompts of a file; empty lines are passed over.

    Args:
        namespace: of lines that name none.

    Raises:
        OptionError: the file cannot be read, or a line cannot be used; the message names it.
    """
    check_namespace(namespace)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} is not read: {error}") from error
    return list(_parsed(path, lines, namespace))


def _parsed(path: Path, lines: Sequence[str], namespace: str) -> Iterator[PromptLine]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name = f"{path}:{number}"
        try:
            yield _prompt_line(name, json.loads(line), namespace)
        except (ValueError, RecursionError) as error:  # OptionError is a ValueError
            raise OptionError(f"{name}: {error}") from error


def _prompt_line(name: str, values: Any, namespace: str) -> PromptLine:
    if not isinstance(values, dict):
        raise OptionError('write an object, such as {"prompt": "…"}')
    if not is_unicode(json.dumps(values, ensure_ascii=False)):
        raise OptionError("a text has half of a UTF-16 pair (\\ud800 to \\udfff)")
    if unknown := sorted(values.keys() - set(_FIELDS)):
        raise OptionError(f"unknown {unknown}: there are {', '.join(_FIELDS)}")
    if ("prompt" in values) == ("messages" in values):
        raise OptionError("give a prompt or messages")
    version = values.get("source_version", "")
    if not isinstance(version, str):
        raise OptionError(f"source_version is {version!r}: use a text")
    prompt = (
        _text(values["prompt"])
        if "prompt" in values
        else text_messages(values["messages"], "only text can be stored ahead")
    )
    return PromptLine(name, prompt, check_namespace(values.get("namespace", namespace)), version)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"prompt is {value!r}: use a text")
    return value
