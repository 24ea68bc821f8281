"""What answers a framework's LLM class: an engine in this process, or a server.

Neutral of any framework: prompts are text or OpenAI's messages, options are OpenAI's and vLLM's own
names. Works without vLLM installed, for as long as no engine is started.
"""

from semkv_rag.llm.local import LocalBackend
from semkv_rag.llm.remote import RemoteBackend
from semkv_rag.llm.shared import close_engines, shared_engine
from semkv_rag.llm.types import Backend, Message, Part, Prompt, ToolCall

__all__ = [
    "Backend",
    "LocalBackend",
    "Message",
    "Part",
    "Prompt",
    "RemoteBackend",
    "ToolCall",
    "close_engines",
    "shared_engine",
]
