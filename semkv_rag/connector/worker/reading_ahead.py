"""Chunks are read into memory while the requests that will blend them wait for their turn."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from concurrent.futures import Future

from semkv_rag.connector.messages import ReadAhead
from semkv_rag.connector.threads import pool_behind_model
from semkv_rag.connector.worker.chunk_files import ChunkFiles


class ReadingAhead:
    """Has a thread of its own read the chunks of queued requests; one per worker, in the model's thread.

    Args:
        files: whose memory is filled.
    """

    def __init__(self, files: ChunkFiles) -> None:
        self._files = files
        self._thread = pool_behind_model(1, "semkv-ahead")
        self._wanted: dict[str, Future[None]] = {}  # by request

    def begin(self, tasks: Iterable[ReadAhead]) -> None:
        """Let the chunks of requests be read, in this order."""
        self._wanted = {name: work for name, work in self._wanted.items() if not work.done()}
        for task in tasks:
            self._wanted[task.request_id] = self._thread.submit(self._files.read_ahead, task)

    def stop(self, request_ids: Collection[str]) -> None:
        """What is not begun of requests that ended, or have their turn, is not read ahead."""
        for request_id in self._wanted.keys() & set(request_ids):
            self._wanted.pop(request_id).cancel()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
