"""A server that tests start: a process of its own on a free port, which ends with its parent."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Final, Self

from workbench.postgres import end_with_parent

STARTING_S: Final = 60.0


class LocalServer:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop it; may be called again."""
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
