"""How stored chunks are found in a prompt, and what is taken from them."""

from semkv_rag.reuse.conversations import Conversations
from semkv_rag.reuse.images import (
    ImageRows,
    first_to_compute,
    image_key,
    images_in_blend,
    tell_images_apart,
)
from semkv_rag.reuse.matcher import ChunkIndex
from semkv_rag.reuse.plan import ReusePlan, Span, make_plan
from semkv_rag.reuse.question import Question
from semkv_rag.reuse.tokens import StoredTokens, TokenArray, token_array

__all__ = [
    "ChunkIndex",
    "Conversations",
    "ImageRows",
    "Question",
    "ReusePlan",
    "Span",
    "StoredTokens",
    "TokenArray",
    "first_to_compute",
    "image_key",
    "images_in_blend",
    "make_plan",
    "tell_images_apart",
    "token_array",
]
