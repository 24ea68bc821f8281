"""Worker processes of a pipeline store through the one process that has the engine.

`IngestionPipeline.run(num_workers=…)` pickles its transformations into worker processes. An engine is not
for pickling, and one for each worker would be a model in memory for each. So a worker gets an address,
and what arrives there is stored by the engine that is running.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import current_process
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent
from llama_index.llms.semkv.documents import by_document

from semkv_rag.errors import EngineError

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1
"""Behind a connection that failed. Without, a process that is out of file handles would spin."""


class Window:
    """Where worker processes hand in their documents.

    Only children of this process are let in: they inherit its `multiprocessing` key.

    Args:
        store: a method that stores documents. Its object is not kept alive by being served here.
    """

    def __init__(self, store: Callable[[Any], object]) -> None:
        self._store = weakref.WeakMethod(store)
        self._listener = Listener(family="AF_UNIX", authkey=_key())
        threading.Thread(target=self._open, name="semkv-window", daemon=True).start()

    @property
    def address(self) -> str:
        return str(self._listener.address)

    def _open(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except Exception as error:  # somebody without the key, or gone before we answered
                logger.warning("a worker process was not let in: %s", error or type(error).__name__)
                time.sleep(PAUSE_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        with connection:
            documents = json.loads(connection.recv_bytes())
            try:
                if (store := self._store()) is None:
                    raise EngineError("the KVPrecompute that this worker is of is gone")
                store(documents)
                answer = ""
            except Exception as error:
                answer = str(error) or type(error).__name__
            connection.send_bytes(answer.encode())


class Routed(TransformComponent):
    """A `KVPrecompute` in a worker process."""

    address: str = Field(description="Of the window of the process that has the engine.")
    identity: dict[str, Any] = Field(description="What the `KVPrecompute` says of itself.")

    def __init__(self, address: str, identity: dict[str, Any]) -> None:
        super().__init__(**{"address": address, "identity": identity})

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        return self.identity

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        try:
            with Client(self.address, authkey=_key()) as connection:
                connection.send_bytes(json.dumps(by_document(nodes)).encode())
                error = connection.recv_bytes().decode()
        except (OSError, EOFError) as fault:
            raise EngineError(f"the process with the engine does not answer: {fault}") from fault
        if error:
            raise EngineError(error)
        return nodes


def _key() -> bytes:
    return bytes(current_process().authkey)
