"""Many threads and tasks over one engine: every prompt has a marker, and its answer is that marker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asking import as_documents, report
from langchain_core.messages import AIMessageChunk
from langchain_semkv import ChatSemKV, SemKVLLM

from semkv_rag.engine import Engine

THREADS, TASKS = 16, 64
YEARS = range(1940, 1940 + THREADS + TASKS)  # the reader knows them


def _prompt(stored: str, year: int) -> str:
    """A stored document, and one that is this prompt's own."""
    return (
        f"{stored} The Tre klim school was launched in {year} . It is led by Liam . "
        "Question : when was Tre klim launched ? Answer :"
    )


@pytest.fixture(scope="module")
def asked(engine: Engine, documents: list[str]) -> dict[str, str]:
    """The prompts, and what is answered when each is asked alone."""
    stored = as_documents(documents)[1].page_content
    llm = SemKVLLM(engine=engine, max_tokens=3, ratio=1.0)
    prompts = [_prompt(stored, year) for year in YEARS]
    answers = {prompt: llm.invoke(prompt).strip() for prompt in prompts}
    marked = [str(year) in answer for year, answer in zip(YEARS, answers.values(), strict=True)]
    assert sum(marked) >= 0.9 * len(marked), "the reader reads the markers"
    return answers


def _whole(chunks: Iterator[Any]) -> str:
    *parts, last = chunks
    assert report(last).kv_cache == "hit"
    assert isinstance(last, AIMessageChunk)
    return "".join(part.text for part in [*parts, last]).strip()


async def test_no_answer_is_another_s(engine: Engine, asked: dict[str, str]) -> None:
    prompts = list(asked)
    chat = ChatSemKV(engine=engine, max_tokens=3, ratio=1.0)
    llm = SemKVLLM(engine=engine, max_tokens=3, ratio=1.0)
    engine.reset_prefix_cache()

    def in_a_thread(prompt: str) -> list[str]:
        return [
            _whole(chat.stream(prompt)),
            chat.invoke(prompt).text.strip(),
            llm.invoke(prompt).strip(),
        ]

    async def in_a_task(number: int, prompt: str) -> list[str]:
        if number % 2:
            return [(await chat.ainvoke(prompt)).text.strip(), (await llm.ainvoke(prompt)).strip()]
        parts = []
        async for chunk in chat.astream(prompt):
            parts.append(chunk.text)
            await asyncio.sleep(0)  # others' streams go on in between
        return ["".join(parts).strip()]

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(THREADS) as pool:
        threads = [loop.run_in_executor(pool, in_a_thread, one) for one in prompts[:THREADS]]
        tasks = [in_a_task(number, one) for number, one in enumerate(prompts[THREADS:])]
        said = await asyncio.wait_for(asyncio.gather(*threads, *tasks), 300)
    for prompt, answers in zip(prompts, said, strict=True):
        assert set(answers) == {asked[prompt]}


async def test_left_streams_do_not_hold_up_the_others(
    engine: Engine, asked: dict[str, str]
) -> None:
    endless = ChatSemKV(engine=engine, max_tokens=400, sampling={"ignore_eos": True})
    left = []
    for prompt in list(asked)[:8]:
        stream = endless.astream(prompt)
        await anext(stream)
        left.append(stream)
    for stream in left:
        await stream.aclose()  # type: ignore[attr-defined]
    prompt, answer = next(iter(asked.items()))
    chat = ChatSemKV(engine=engine, max_tokens=3, ratio=1.0)
    assert (await asyncio.wait_for(chat.ainvoke(prompt), 60)).text.strip() == answer
