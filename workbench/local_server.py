"""A server that tests start: a process of its own on a free port, which ends with its parent."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Final, Self

from workbench.postgres import end_with_parent

STARTING_S: Final = 60.0


class LocalEndpoint(ABC):
    """What listens at a port of this machine; a context manager.

    Attributes:
        port: where.
    """

    port: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def close(self) -> None:
        """End it; may be called again."""


class LocalServer(LocalEndpoint):
    """A server of its own, started at once; a context manager.

    Args:
        name: what it is, for the error.
        command: what starts it at a port.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self, name: str, command: Callable[[int], Sequence[str]]) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            command(self.port),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the tests
            preexec_fn=end_with_parent,
        )
        until = time.monotonic() + STARTING_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise RuntimeError(f"the {name} server does not start")
            time.sleep(0.05)

    def close(self) -> None:
        """See `LocalEndpoint`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)  # nobody needs what it holds
            self._process.wait()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
