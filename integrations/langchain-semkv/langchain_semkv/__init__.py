"""LangChain's interfaces to semkv-rag."""

from langchain_semkv.chat_models import ChatSemKV
from langchain_semkv.index import SemKVIndex
from langchain_semkv.llms import SemKVLLM
from langchain_semkv.precompute import SemKVPrecompute
from semkv_rag.llm import close_engines

__all__ = ["ChatSemKV", "SemKVIndex", "SemKVLLM", "SemKVPrecompute", "close_engines"]
