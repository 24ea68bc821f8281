"""A small FastAPI service that streams answers, with what was reused in the last line.

    uvicorn --app-dir examples langchain_fastapi:app        # then GET /ask?question=…
    python examples/langchain_fastapi.py                    # starts it, asks one question, ends it

What changes from a plain LLM:

    -from langchain_openai import ChatOpenAI
    -llm = ChatOpenAI(model=MODEL)
    +from langchain_semkv import ChatSemKV
    +llm = ChatSemKV(model=MODEL, store=STORE)

The engine is started with the service, not with the first request. A client that goes away ends its
answer: the stream is closed, and with it the request in vLLM.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from _langchain import ENGINE_ARGS, MODEL, QUESTIONS, STORE, TEMPLATE, documents, join, vector_store
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_semkv import ChatSemKV, SemKVPrecompute

llm = ChatSemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)
vectors = vector_store()
retriever = vectors.as_retriever(search_kwargs={"k": 3})
context: Any = {"context": retriever | join, "input": RunnablePassthrough()}
chain = context | ChatPromptTemplate.from_template(TEMPLATE) | llm


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    """Store the documents; that starts the engine."""
    stored = await SemKVPrecompute(llm).atransform_documents(documents())
    await vectors.aadd_documents(list(stored))
    yield


app = FastAPI(lifespan=lifespan)


@app.get("/ask")
async def ask(question: str) -> StreamingResponse:
    """One JSON object a line: `text` as it comes, then `report`."""

    async def lines() -> AsyncIterator[str]:
        async for chunk in chain.astream(question):
            if chunk.text:
                yield json.dumps({"text": chunk.text}) + "\n"
            if "semkv" in chunk.response_metadata:
                yield json.dumps({"report": chunk.response_metadata["semkv"]}) + "\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def main() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.1)
        url, asked = f"http://127.0.0.1:{port}/ask", {"question": QUESTIONS[0]}
        with httpx.stream("GET", url, params=asked, timeout=60) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                print(line)
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
