"""`create_stuff_documents_chain` with documents whose KV is stored.

    python examples/langchain_stuff.py

What changes from a plain LLM:

    -from langchain_openai import ChatOpenAI
    -llm = ChatOpenAI(model=MODEL)
    +from langchain_semkv import ChatSemKV
    +llm = ChatSemKV(model=MODEL, store=STORE)

The chain writes each document into its prompt by a `document_prompt`. `SemKVPrecompute` is given the
same one, so that what is stored is what the model will see.
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
    vector_store,
)
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_semkv import ChatSemKV, SemKVPrecompute

DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")


def main() -> None:
    llm = ChatSemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)

    precompute = SemKVPrecompute(llm, document_prompt=DOCUMENT_PROMPT)
    vectors = vector_store()
    vectors.add_documents(list(precompute.transform_documents(documents())))
    if precompute.result is not None:
        print(f"{precompute.result.chunks_captured} documents were computed now")

    stuff = create_stuff_documents_chain(
        llm,
        ChatPromptTemplate.from_template(TEMPLATE),
        document_prompt=DOCUMENT_PROMPT,
        document_separator="\n",
    )
    chain = create_retrieval_chain(vectors.as_retriever(search_kwargs={"k": 3}), stuff)
    for question in QUESTIONS:
        answered = chain.invoke({"input": question}, config={"callbacks": [Reports()]})
        print(question, answered["answer"])


if __name__ == "__main__":
    main()
