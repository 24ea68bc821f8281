"""What a pipeline drops from its docstore goes from the store too.

An `IngestionPipeline` tells its transformations of documents that come, not of those that go. It does
run inside a span of LlamaIndex's instrumentation: what is in the docstore before a run and not after it
is gone. A document that merely changed is still there, so its chunks are left to `KVPrecompute`.
"""

from __future__ import annotations

import inspect
import logging
import threading
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.span import BaseSpan
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.schema import TransformComponent
from llama_index.core.storage.docstore import BaseDocumentStore

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_handling = False


class Forgets(TransformComponent):
    """A step of a pipeline that is told of documents which leave the docstore."""

    @abstractmethod
    def forget(self, ref_doc_ids: Iterable[str]) -> int:
        """Remove documents; how many of them were there."""


def follow_deletions() -> None:
    """See to it that documents which leave the docstore of a pipeline are forgotten by its steps."""
    global _handling
    with _lock:
        if not _handling:
            get_dispatcher().add_span_handler(_Runs())
            _handling = True


class _Runs(BaseSpanHandler[BaseSpan]):
    """Compares a pipeline's docstore before and after each run. Keeps no spans."""

    before: dict[str, set[str]] = {}  # noqa: RUF012 (a pydantic field)

    @classmethod
    def class_name(cls) -> str:
        return "SemKVRuns"

    def new_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_span_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        pipeline: Any = instance
        if _steps(pipeline):
            self.before[id_] = _documents(pipeline.docstore)

    def prepare_to_exit_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        result: Any | None = None,
        **kwargs: Any,
    ) -> None:
        if (before := self.before.pop(id_, None)) is None:
            return
        pipeline: Any = instance
        docstore: BaseDocumentStore = pipeline.docstore
        maybe = before - _documents(docstore)
        gone = sorted(name for name in maybe if docstore.get_document_hash(name) is None)
        for step in _steps(pipeline) if gone else ():
            try:
                step.forget(gone)
            except Exception:
                logger.exception("Deleted documents are still in the store: %s", ", ".join(gone))

    def prepare_to_drop_span(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        err: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        # A run that failed may have deleted before it did. It also took changed documents out of
        # the docstore, which come again as new ones.
        self.prepare_to_exit_span(id_, bound_args, instance)


def _steps(pipeline: Any) -> list[Forgets]:
    """The pipeline's steps that forget, when it has a docstore to follow."""
    if not isinstance(pipeline, IngestionPipeline) or pipeline.docstore is None:
        return []
    return [step for step in pipeline.transformations if isinstance(step, Forgets)]


def _documents(docstore: BaseDocumentStore) -> set[str]:
    return set(docstore.get_all_document_hashes().values())
