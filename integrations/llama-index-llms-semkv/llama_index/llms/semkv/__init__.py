"""LlamaIndex's LLM interface to semkv-rag."""

from llama_index.llms.semkv.base import SemKV

from semkv_rag.backend import close_engines

__all__ = ["SemKV", "close_engines"]
