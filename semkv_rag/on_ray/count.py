"""What a run on Ray has done so far, counted from what the engines say."""

from __future__ import annotations

import time
from collections.abc import Sequence

from semkv_rag.corpus.document_text import DocumentText
from semkv_rag.corpus.progress import Failure, OnProgress, PrecomputeProgress, PrecomputeResult
from semkv_rag.on_ray.messages import Outcome

RETRIES = 10
"""So often a parcel is handed out again after its engine was killed: a document may be what kills it."""


class Count:
    """Adds outcomes up in a result.

    Args:
        documents: all that were handed out.
        result: is added to.
        on_progress: called with each outcome.
    """

    def __init__(
        self,
        documents: Sequence[DocumentText],
        result: PrecomputeResult,
        on_progress: OnProgress | None,
    ) -> None:
        self._waiting = {one.name: len(one.text) for one in documents}
        self._documents = len(documents)
        self._characters = sum(self._waiting.values())
        self._result = result
        self._on_progress = on_progress
        self._began: float | None = None

    def add(self, outcome: Outcome) -> None:
        """Count what an engine made of some documents.

        Raises:
            SemKVError: the run cannot go on.
        """
        outcome.check()
        total, own, now = self._result, outcome.result, time.monotonic()
        began = now - own.computing_seconds
        self._began = began if self._began is None else min(began, self._began)
        total.computing_seconds = now - self._began
        # Unchanged there is what an engine had stored when it was killed.
        total.changed += own.changed + own.unchanged
        total.chunks_captured += own.chunks_captured
        total.chunks_reused += own.chunks_reused
        total.tokens += own.tokens
        total.bytes += own.bytes
        total.failures.extend(own.failures)
        for name in outcome.names:
            self._waiting.pop(name, None)
        self._report_progress()

    def end(self) -> None:
        """All engines are done: what none of them told of has failed."""
        reason = f"each of {RETRIES + 1} engines that were to compute it stopped or was killed"
        self._result.failures.extend(Failure(name, reason) for name in self._waiting)

    def _report_progress(self) -> None:
        if self._on_progress:
            result, left = self._result, sum(self._waiting.values())
            self._on_progress(
                PrecomputeProgress(
                    phase="computing",
                    documents=self._documents - len(self._waiting),
                    documents_total=self._documents,
                    share=1 - left / max(1, self._characters),
                    chunks=result.chunks_captured,
                    tokens=result.tokens,
                    bytes=result.bytes,
                )
            )
