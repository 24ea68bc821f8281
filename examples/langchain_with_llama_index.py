"""Both frameworks on one engine and one store: what one has stored, the other's prompts take.

    python examples/langchain_with_llama_index.py

What changes from plain LLMs:

    -llm = ChatOpenAI(model=MODEL)
    -Settings.llm = Vllm(model=MODEL)
    +llm = ChatSemKV(model=MODEL, store=STORE)
    +Settings.llm = SemKV(model=MODEL, store=STORE)

LangChain ingests and answers, LlamaIndex answers over the same texts. Both classes name the same model,
store and arguments, so they share the one engine of the process.
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
    in_words,
    vector_store,
)
from langchain_core.prompts import ChatPromptTemplate
from langchain_semkv import ChatSemKV, SemKVPrecompute
from llama_index.llms.semkv import SemKV


def main() -> None:
    llm = ChatSemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)
    vectors = vector_store()
    vectors.add_documents(list(SemKVPrecompute(llm).transform_documents(documents())))
    chain = ChatPromptTemplate.from_template(TEMPLATE) | llm
    same = SemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)

    for question in QUESTIONS:
        found = vectors.similarity_search(question, k=3)
        context = "\n".join(document.page_content for document in found)
        given = {"context": context, "input": question}
        print("LangChain: ", question, chain.invoke(given, config={"callbacks": [Reports()]}).text)
        # The other way round, so that vLLM's own cache does not answer.
        context = "\n".join(document.page_content for document in reversed(found))
        answer = same.complete(TEMPLATE.format(context=context, input=question))
        print("LlamaIndex:", question, answer.text)
        print("   ", in_words(answer.additional_kwargs["semkv"]))


if __name__ == "__main__":
    main()
