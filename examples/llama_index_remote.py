"""A LlamaIndex query engine on a server: `semkv serve` has the model, this process needs no vLLM.

    semkv serve MODEL --store kv/ --port 8000
    python examples/llama_index_remote.py --base-url http://localhost:8000/v1

Without `--base-url` it starts a server of the reader for itself. What changes from a plain LLM:

    -from llama_index.llms.openai_like import OpenAILike
    -llm = OpenAILike(api_base=URL, is_chat_model=True)
    +from llama_index.llms.semkv import SemKV
    +llm = SemKV(base_url=URL)
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from _llama_index import Reports, embedding, paragraphs, reader_server
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.llms.semkv import SemKV, precompute_index

QUESTION = "which mascot does Mir bol have ?"


def main() -> None:
    parser = argparse.ArgumentParser(description="A query engine on a server.")
    parser.add_argument("--base-url", help="of a running server, up to and with /v1")
    parser.add_argument("--api-key", help="of that server")
    given = parser.parse_args()
    with reader_server() if given.base_url is None else nullcontext(given.base_url) as url:
        ask(url, given.api_key)


def ask(url: str, api_key: str | None) -> None:
    llm = SemKV(base_url=url, api_key=api_key, max_tokens=4)
    index = VectorStoreIndex(paragraphs(), embed_model=embedding())
    result = precompute_index(index, llm)
    print(f"{result.documents} nodes, {result.chunks_captured} of them computed by the server")
    query_engine = index.as_query_engine(
        llm=llm,
        similarity_top_k=3,
        streaming=True,
        # The reader knows this one form of prompt.
        text_qa_template=PromptTemplate("{context_str} Question : {query_str} Answer :"),
    )
    with Reports() as reports:
        answer = str(query_engine.query(QUESTION)).strip()
    print(QUESTION, answer)
    print(f"    {reports}")


if __name__ == "__main__":
    main()
