"""Many questions at once: `abatch` is one batch in vLLM, and the documents they share are read once.

    python examples/langchain_async_batch.py

What changes from a plain LLM:

    -from langchain_openai import ChatOpenAI
    -llm = ChatOpenAI(model=MODEL)
    +from langchain_semkv import ChatSemKV
    +llm = ChatSemKV(model=MODEL, store=STORE)
"""

from __future__ import annotations

import asyncio
import json
import time

from _langchain import ENGINE_ARGS, HERE, MODEL, STORE, TEMPLATE, documents, join, vector_store
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_semkv import ChatSemKV, SemKVPrecompute


async def main() -> None:
    llm = ChatSemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)
    vectors = vector_store()
    stored = await SemKVPrecompute(llm).atransform_documents(documents())
    await vectors.aadd_documents(list(stored))

    retriever = vectors.as_retriever(search_kwargs={"k": 3})
    context = {"context": retriever | join, "input": RunnablePassthrough()}
    chain = context | ChatPromptTemplate.from_template(TEMPLATE) | llm
    asked = json.loads((HERE / "corpus" / "questions.json").read_text())[:24]
    began = time.perf_counter()
    answers = await chain.abatch([one["question"] for one in asked])
    seconds = time.perf_counter() - began

    right = sum(
        said.text.strip() == one["answer"] for one, said in zip(asked, answers, strict=True)
    )
    usage = [said.usage_metadata for said in answers if said.usage_metadata is not None]
    read = sum(one["input_token_details"]["cache_read"] for one in usage)
    given = sum(one["input_tokens"] for one in usage)
    print(f"{len(asked)} questions in {seconds:.1f} s, {right} answered right")
    print(f"{read} of {given} prompt tokens were not computed")


if __name__ == "__main__":
    asyncio.run(main())
