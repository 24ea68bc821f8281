"""Many callers at once on one engine: each gets its own answer, nothing hangs, Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.llms import ChatMessage
from llama_index.llms.semkv import SemKV

from semkv_rag.engine import Engine
from workbench.settings import READER, ROOT
from workbench.starts import program

CORPUS = ROOT / "examples" / "corpus"
THREADS = 16
TASKS = 64


@pytest.fixture(scope="module")
def llm(engine: Engine) -> SemKV:
    return SemKV(engine=engine, max_tokens=4)


@pytest.fixture(scope="module")
def asked(llm: SemKV) -> list[tuple[str, str]]:
    """Prompts with stored chunks, each with the word that only its own answer has to be."""
    pairs = []
    for entry in json.loads((CORPUS / "questions.json").read_text()):
        document = (CORPUS / entry["source"]).read_text()
        prompt = f"{document} Question : {entry['question']} Answer :"
        if llm.complete(prompt).text.strip() == entry["answer"]:
            pairs.append((prompt, entry["answer"]))
    assert len(pairs) >= TASKS
    pairs = pairs[:TASKS]
    assert len({answer for _, answer in pairs}) > TASKS / 2
    return pairs


def ask(llm: SemKV, number: int, prompt: str) -> str:
    """One of the four ways, by its number."""
    if number % 4 == 0:
        return llm.complete(prompt).text
    if number % 4 == 1:
        return llm.chat([ChatMessage(prompt)]).message.content or ""
    if number % 4 == 2:
        return "".join(part.delta or "" for part in llm.stream_complete(prompt))
    return "".join(part.delta or "" for part in llm.stream_chat([ChatMessage(prompt)]))


async def aask(llm: SemKV, number: int, prompt: str) -> str:
    if number % 4 == 0:
        return (await llm.acomplete(prompt)).text
    if number % 4 == 1:
        return (await llm.achat([ChatMessage(prompt)])).message.content or ""
    if number % 4 == 2:
        return "".join([part.delta or "" async for part in await llm.astream_complete(prompt)])
    stream = await llm.astream_chat([ChatMessage(prompt)])
    return "".join([part.delta or "" async for part in stream])


@pytest.mark.timeout(120)
def test_sixteen_threads(llm: SemKV, asked: list[tuple[str, str]]) -> None:
    with ThreadPoolExecutor(THREADS) as threads:
        answers = threads.map(lambda item: ask(llm, item[0], item[1][0]), enumerate(asked))
        assert [answer.strip() for answer in answers] == [answer for _, answer in asked]


@pytest.mark.timeout(120)
async def test_sixty_four_tasks(llm: SemKV, asked: list[tuple[str, str]]) -> None:
    tasks = [aask(llm, number, prompt) for number, (prompt, _) in enumerate(asked)]
    answers = await asyncio.gather(*tasks)
    assert [answer.strip() for answer in answers] == [answer for _, answer in asked]


@pytest.mark.timeout(120)
async def test_both_at_once(llm: SemKV, asked: list[tuple[str, str]]) -> None:
    def in_threads() -> list[str]:
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda i: ask(llm, i[0], i[1][0]), enumerate(asked)))

    loop_side = [aask(llm, number, prompt) for number, (prompt, _) in enumerate(asked)]
    threaded, *answers = await asyncio.gather(asyncio.to_thread(in_threads), *loop_side)
    wanted = [answer for _, answer in asked]
    assert [answer.strip() for answer in threaded] == wanted
    assert [answer.strip() for answer in answers] == wanted


@pytest.mark.timeout(120)
def test_interleaved_streams(llm: SemKV, asked: list[tuple[str, str]]) -> None:
    streams = [llm.stream_complete(prompt) for prompt, _ in asked[:12]]
    said = [""] * len(streams)
    running = set(range(len(streams)))
    while running:
        for number in sorted(running):
            part = next(streams[number], None)
            if part is None:
                running.discard(number)
            else:
                said[number] += part.delta or ""
    assert [text.strip() for text in said] == [answer for _, answer in asked[:12]]


@pytest.mark.timeout(120)
async def test_a_cancelled_task_disturbs_nobody(llm: SemKV, asked: list[tuple[str, str]]) -> None:
    endless = asyncio.create_task(llm.acomplete(asked[0][0], max_tokens=500, ignore_eos=True))
    others = [asyncio.create_task(aask(llm, n, p)) for n, (p, _) in enumerate(asked[:8])]
    await asyncio.sleep(0.05)
    endless.cancel()
    answers = await asyncio.gather(*others)
    assert [answer.strip() for answer in answers] == [answer for _, answer in asked[:8]]
    with pytest.raises(asyncio.CancelledError):
        await endless


@pytest.mark.timeout(120)
def test_query_engines_in_threads(
    llm: SemKV, index: VectorStoreIndex, asked: list[tuple[str, str]]
) -> None:
    """With lazy streams that are read in another order than they were asked for."""
    template = PromptTemplate("{context_str} Question : {query_str} Answer :")
    query_engine = index.as_query_engine(
        llm=llm, streaming=True, text_qa_template=template, similarity_top_k=2
    )
    questions = [
        prompt.rpartition("Question : ")[2].removesuffix(" Answer :") for prompt, _ in asked
    ]
    questions = questions[:THREADS]

    def read(response: object) -> str:
        return "".join(response.response_gen)  # type: ignore[attr-defined]

    alone = [read(query_engine.query(question)) for question in questions]
    with ThreadPoolExecutor(THREADS) as threads:
        responses = list(threads.map(query_engine.query, questions))
    together = [read(response) for response in reversed(responses)]
    assert together[::-1] == alone


SYNC = """
for part in llm.stream_complete("The Mok pis school"):
    print("said", flush=True)
"""
ASYNC = """
import asyncio
async def main():
    await asyncio.gather(*(read(n) for n in range(4)))
async def read(number):
    async for part in await llm.astream_complete(f"The Mok pis school {number}"):
        print("said", flush=True)
asyncio.run(main())
"""
START = """
import sys
from llama_index.llms.semkv import SemKV
llm = SemKV(
    model=sys.argv[1], store=sys.argv[2], max_tokens=900, sampling={"ignore_eos": True},
    engine_args={"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20},
)
"""


@pytest.mark.engine
@pytest.mark.soak
@pytest.mark.parametrize("way", [SYNC, ASYNC], ids=["stream", "tasks"])
def test_ctrl_c_ends_cleanly(tmp_path: Path, way: str) -> None:
    """LangChain's classes end the same way, in the same code; `make test` has that one."""
    script = tmp_path / "script.py"
    script.write_text(START + way)
    with (tmp_path / "errors").open("w+") as errors, program():
        process = subprocess.Popen(
            [sys.executable, str(script), str(READER), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "said\n", (tmp_path / "errors").read_text()[-4000:]
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to all of its processes
            process.stdout.read()
            process.wait(60)
        finally:
            left = _session(process.pid)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1)
    assert "KeyboardInterrupt" in (tmp_path / "errors").read_text()
    assert left == []


def _session(leader: int) -> list[int]:
    """The processes of a session that are still there, after a moment to go."""
    until = time.monotonic() + 20
    while True:
        left = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                left.append(int(entry.parent.name))
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.2)
