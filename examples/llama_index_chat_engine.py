"""A LlamaIndex chat engine whose turns take the KV of their documents out of a store.

    python examples/llama_index_chat_engine.py

What changes from a plain LLM:

    -from llama_index.llms.vllm import Vllm
    -llm = Vllm(model=MODEL)
    +from llama_index.llms.semkv import SemKV
    +llm = SemKV(model=MODEL, store=STORE)

The documents' KV is stored before the first question (`precompute_index`; a second run finds it). Each
turn's answer is streamed, and followed by what was reused.
"""

from __future__ import annotations

from _llama_index import BUILD, ENGINE_ARGS, READER, Reports, embedding, paragraphs
from llama_index.core import VectorStoreIndex
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.llms.semkv import SemKV, precompute_index

MODEL, STORE = str(READER), BUILD / "chat-store"
QUESTIONS = ("which mascot does Mir bol have ?", "when was Me sus launched ?")


def main() -> None:
    llm = SemKV(model=MODEL, store=STORE, engine_args=ENGINE_ARGS, max_tokens=4)
    index = VectorStoreIndex(paragraphs(), embed_model=embedding())
    result = precompute_index(index, llm)
    print(f"{result.documents} nodes, {result.chunks_captured} of them computed now")

    for question in QUESTIONS:
        chat = ContextChatEngine.from_defaults(
            retriever=index.as_retriever(similarity_top_k=3),
            llm=llm,
            context_template="{context_str}",  # the reader knows this one form of prompt
        )
        with Reports() as reports:
            answer = chat.stream_chat(f"Question : {question} Answer :")
            print(question, *answer.response_gen)
        print(f"    {reports}")


if __name__ == "__main__":
    main()
