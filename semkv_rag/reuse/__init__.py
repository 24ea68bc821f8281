"""How stored chunks are found in a prompt, and what is taken from them."""

from semkv_rag.reuse.matcher import ChunkIndex
from semkv_rag.reuse.plan import ReusePlan, Span, make_plan
from semkv_rag.reuse.tokens import StoredTokens, TokenArray, token_array

__all__ = [
    "ChunkIndex",
    "ReusePlan",
    "Span",
    "StoredTokens",
    "TokenArray",
    "make_plan",
    "token_array",
]
