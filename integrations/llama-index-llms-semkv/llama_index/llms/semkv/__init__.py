"""LlamaIndex's LLM interface to semkv-rag, and what stores its documents' KV ahead."""

from llama_index.llms.semkv.base import SemKV
from llama_index.llms.semkv.precompute import KVPrecompute, precompute_index

from semkv_rag.llm import close_engines

__all__ = ["KVPrecompute", "SemKV", "close_engines", "precompute_index"]
