"""Retrieved documents as hints: their stored KV is read ahead while the prompt is still being built.

LangChain adds a handler that a configure hook names to every callback manager. Ours hears what any
retriever of the process returns, and tells it to the models that are alive and whose engine runs. That
is best effort: chunks are found in prompts by their tokens, with or without a hint.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.tracers.context import register_configure_hook

if TYPE_CHECKING:
    from langchain_semkv.base import SemKVModel

# By identity: a model is no key, since two with the same options are equal.
_models: weakref.WeakValueDictionary[int, SemKVModel[Any]] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class RetrieverHints(BaseCallbackHandler):
    """Passes what retrievers return to the running backends; hears nothing else."""

    ignore_llm = True
    ignore_chain = True
    ignore_agent = True
    ignore_chat_model = True
    ignore_retry = True
    ignore_custom_event = True

    def on_retriever_end(
        self,
        documents: Sequence[Document],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        **kwargs: Any,
    ) -> None:
        texts = [document.page_content for document in documents]
        if not texts:
            return
        with _lock:
            models = list(_models.values())
        told = set()
        for model in models:
            # A hint never fails the retriever's run, whatever state an engine is in.
            with suppress(Exception):
                backend = model.running_backend()
                if backend is not None and (id(backend), model.namespace) not in told:
                    told.add((id(backend), model.namespace))
                    backend.hint(texts, namespace=model.namespace)


_HANDLER = RetrieverHints()
# As the variable's default it is heard in every thread and context.
_handler: ContextVar[RetrieverHints | None] = ContextVar("semkv_hints", default=_HANDLER)
register_configure_hook(_handler, inheritable=False)


def watch(model: SemKVModel[Any]) -> None:
    """Tell `model` of retrieved documents for as long as it is alive."""
    with _lock:
        _models[id(model)] = model
