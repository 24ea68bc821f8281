"""A chain in LangChain's expression language whose prompts take their documents' KV out of a store.

    python examples/langchain_lcel.py

What changes from a plain LLM:

    -from langchain_openai import ChatOpenAI
    -llm = ChatOpenAI(model=MODEL)
    +from langchain_semkv import ChatSemKV
    +llm = ChatSemKV(model=MODEL, store=STORE)

The documents' KV is stored by the same call that fills the vector store: `index` with a `SemKVIndex` as
its destination. The record manager tells what is new, so a second run of a service computes nothing.
"""

from __future__ import annotations

from _langchain import (
    ENGINE_ARGS,
    MODEL,
    QUESTIONS,
    STORE,
    TEMPLATE,
    Reports,
    documents,
    join,
    vector_store,
)
from langchain_core.indexing import InMemoryRecordManager, index
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_semkv import ChatSemKV, SemKVIndex


def main() -> None:
    llm = ChatSemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)

    destination = SemKVIndex(llm=llm, vector_store=vector_store(), search_kwargs={"k": 3})
    records = InMemoryRecordManager("documents")
    records.create_schema()
    done = index(
        documents(),
        records,
        destination,
        cleanup="incremental",
        source_id_key="source",
        key_encoder="sha256",
    )
    print(done)

    chain = (
        {"context": destination | join, "input": RunnablePassthrough()}
        | ChatPromptTemplate.from_template(TEMPLATE)
        | llm
        | StrOutputParser()
    )
    for question in QUESTIONS:
        print(question, *chain.stream(question, config={"callbacks": [Reports()]}))


if __name__ == "__main__":
    main()
