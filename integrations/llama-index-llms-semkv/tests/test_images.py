"""Images in messages, on a model that takes them: its answers depend on what is shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ImageBlock, TextBlock
from llama_index.llms.semkv import SemKV
from PIL import Image

from semkv_rag.engine import Engine
from workbench.tiny_models import IMAGE_SIZE


@pytest.fixture(scope="module")
def llm(llava: Engine) -> SemKV:
    return SemKV(engine=llava, max_tokens=2, sampling={"logprobs": True, "ignore_eos": True})


def _picture(color: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), color).save(file, "PNG")
    return file.getvalue()


def _asked(image: ImageBlock) -> list[ChatMessage]:
    return [ChatMessage(role="user", blocks=[TextBlock(text="the colour"), image])]


def _odds(said: ChatResponse) -> float:
    assert said.logprobs
    return said.logprobs[0][0].logprob


def test_an_image_block_is_seen(llm: SemKV, tmp_path: Path) -> None:
    red = _odds(llm.chat(_asked(ImageBlock(image=_picture("red"), image_mimetype="image/png"))))
    blue = _odds(llm.chat(_asked(ImageBlock(image=_picture("blue"), image_mimetype="image/png"))))
    assert abs(red - blue) > 1e-3

    file = tmp_path / "red.png"
    file.write_bytes(_picture("red"))
    assert _odds(llm.chat(_asked(ImageBlock(path=file)))) == pytest.approx(red, abs=1e-4)


async def test_images_stream(llm: SemKV) -> None:
    asked = _asked(ImageBlock(image=_picture("green"), image_mimetype="image/png"))
    parts = [part async for part in await llm.astream_chat(asked)]
    assert parts[-1].message.content == llm.chat(asked).message.content
