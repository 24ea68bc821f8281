"""Files of prompts: what is read, and what is said of a line that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from semkv_rag.corpus.prompt_file import PromptLine, read_prompts
from semkv_rag.errors import OptionError


def test_prompts_and_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    file.write_text(
        '{"prompt": "a\\nb"}\n\n'
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],'
        ' "namespace": "b", "source_version": "2"}\n'
    )
    assert read_prompts(file, "a") == [
        PromptLine(f"{file}:1", "a\nb", "a", ""),
        PromptLine(f"{file}:3", messages, "b", "2"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("prompt", "Expecting value"),
        ('"a text"', "write an object"),
        ('{"prompt": ""}', "prompt is ''"),
        ('{"prompt": 3}', "prompt is 3"),
        ('{"text": "a"}', r"unknown \['text'\]: there are prompt, messages"),
        ("{}", "give a prompt or messages"),
        ('{"prompt": "a", "messages": []}', "give a prompt or messages"),
        ('{"messages": []}', "at least one"),
        ('{"messages": ["a"]}', "a role and content"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "only text"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "has its text"),
        ('{"prompt": "a", "namespace": ""}', "namespace is ''"),
        ('{"prompt": "a", "source_version": 2}', "source_version is 2"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(OptionError, match=rf"prompts\.jsonl:2: .*{words}"):
        read_prompts(file)


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="is not read"):
        read_prompts(file)
