"""What workers report of captures: a datagram, as soon as a capture ends, to whoever asked for it.

Polling the workers would keep them from their work. Each poll is a message to processes of vLLM, and
after a message they look for the next one in a loop for a second, on the cores that compute and write.

Workers on other machines cannot reach the socket, and no worker can where its path would be too long.
Such workers keep their reports until they are asked for by `collective_rpc`.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from semkv_rag.connector.messages import Captured

logger = logging.getLogger(__name__)

ADDRESS_KEY = "capture_results"
"""The key of the address in the connector's configuration."""
MOST_BYTES = 1 << 16
MOST_ERROR = 4000
"""Characters of an error that are told."""
SENDING_S = 0.2


class CaptureResults:
    """The end of the process that asks for captures; one per engine.

    Attributes:
        address: of the socket; None where there is none.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="semkv-")  # nobody else may write there
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address: str | None = str(Path(self._folder.name) / "results")
        try:
            self._socket.bind(self.address)
        except OSError as error:  # a path may have 108 bytes
            logger.info("semkv: captures are asked for, as there is no socket: %s", error)
            self.address = None
        self._thread: threading.Thread | None = None

    def deliver(self, take: Callable[[Mapping[str, Any]], None]) -> None:
        """Have each result taken, as the fields of `Captured`, in a thread of its own; called once."""
        if self.address is not None:
            self._thread = threading.Thread(
                target=_read, args=(self._socket, take), name="semkv-results", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Take no more; a second time nothing is done."""
        address, self.address = self.address, None
        if self._thread is not None and address is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"", address)
            self._thread.join()
        self._socket.close()
        self._folder.cleanup()


def _read(results: socket.socket, take: Callable[[Mapping[str, Any]], None]) -> None:
    while data := results.recv(MOST_BYTES):
        take(json.loads(data))


class CaptureTeller:
    """A worker's end.

    Args:
        address: of `CaptureResults`; None where there is none.
    """

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(SENDING_S)

    def tell(self, captured: Captured) -> bool:
        """Send a result; False when it could not be sent. Safe for threads."""
        if self._address is None:
            return False
        error = captured.error and captured.error[:MOST_ERROR]
        fields = {**asdict(captured), "error": error}
        try:
            self._socket.sendto(json.dumps(fields).encode(), self._address)
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
