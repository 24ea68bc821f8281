"""Retrieved nodes as hints: what was found is read ahead while the prompt is still being built.

LlamaIndex tells of every retrieval by an event, but not which model will see the nodes: so all `SemKV`
objects that have answered before and want hints are told. A hint is never needed: chunks are found in
the prompt by their tokens, whether or not they were hinted at.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.schema import BaseNode, MetadataMode

if TYPE_CHECKING:
    from llama_index.llms.semkv.base import SemKV

_lock = threading.Lock()
_listening: list[weakref.ref[SemKV]] = []
_handling = False


def listen(llm: SemKV) -> None:
    """Pass retrieved nodes on to `llm`, for as long as it lives."""
    global _handling
    with _lock:
        _listening[:] = [reference for reference in _listening if reference() is not None]
        _listening.append(weakref.ref(llm))
        if not _handling:
            get_dispatcher().add_event_handler(RetrievalHints())
            _handling = True


class RetrievalHints(BaseEventHandler):
    """Tells the models of this process what was retrieved, in the thread that retrieved it."""

    @classmethod
    def class_name(cls) -> str:
        return "RetrievalHints"

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if not isinstance(event, RetrievalEndEvent):
            return
        texts = seen_texts(hit.node for hit in event.nodes)
        if not texts:
            return
        with _lock:
            models = [llm for reference in _listening if (llm := reference()) is not None]
        told: set[tuple[int, str | None]] = set()
        for llm in models:
            llm.hint(texts, told)


def seen_texts(nodes: Iterable[BaseNode]) -> Sequence[str]:
    """The nodes' texts as a model gets them, metadata included; those without text left out."""
    texts = (node.get_content(metadata_mode=MetadataMode.LLM) for node in nodes)
    return [text for text in texts if text.strip()]
