"""Images in messages, on a model that takes them: its answers depend on what is shown."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_semkv import ChatSemKV
from PIL import Image

from semkv_rag.engine import Engine
from workbench.tiny_models import IMAGE_SIZE


@pytest.fixture(scope="module")
def llm(llava: Engine) -> ChatSemKV:
    return ChatSemKV(engine=llava, max_tokens=2, sampling={"logprobs": True, "ignore_eos": True})


def _picture(color: str) -> str:
    file = io.BytesIO()
    Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), color).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _standard(color: str) -> dict[str, Any]:
    return {"type": "image", "base64": _picture(color), "mime_type": "image/png"}


def _openai(color: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{_picture(color)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _anthropic(color: str) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": _picture(color)}
    return {"type": "image", "source": source}


def _odds(said: AIMessage) -> float:
    odds: float = said.response_metadata["logprobs"]["content"][0]["logprob"]
    return odds


def _show(llm: ChatSemKV, block: dict[str, Any]) -> float:
    return _odds(llm.invoke([HumanMessage([{"type": "text", "text": "the colour"}, block])]))


@pytest.mark.parametrize("form", [_standard, _openai, _anthropic])
def test_every_form_of_an_image_is_seen(
    llm: ChatSemKV, form: Callable[[str], dict[str, Any]]
) -> None:
    red = _show(llm, form("red"))
    assert red == pytest.approx(_show(llm, _openai("red")), abs=1e-4)
    assert abs(red - _show(llm, form("blue"))) > 1e-3


def test_a_tool_s_image_is_seen(llm: ChatSemKV) -> None:
    def shown(color: str) -> float:
        call = {"name": "look", "args": {}, "id": "1", "type": "tool_call"}
        said = llm.invoke(
            [
                HumanMessage("who owns this harbour"),
                AIMessage("", tool_calls=[call]),
                ToolMessage([_standard(color)], tool_call_id="1"),
            ]
        )
        return _odds(said)

    assert abs(shown("red") - shown("blue")) > 1e-3


async def test_images_stream(llm: ChatSemKV) -> None:
    asked = [HumanMessage([_standard("green")])]
    chunks = [chunk async for chunk in llm.astream(asked)]
    assert chunks[-1].chunk_position == "last"
    assert "".join(chunk.text for chunk in chunks) == llm.invoke(asked).text
