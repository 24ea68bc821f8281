"""An S3 server for tests and benchmarks, and a proxy in front of it that has faults.

The server is moto's, a process of its own: S3's protocol, with everything in memory. It knows no bounds
and checks no signatures.
"""

from __future__ import annotations

import atexit
import http.client
import secrets
import socket
import socketserver
import sys
import threading
from functools import cache
from typing import Final, Literal

from workbench.local_server import LocalEndpoint, LocalServer, free_port

ENVIRONMENT: Final = {
    "AWS_ACCESS_KEY_ID": "semkv-test-key",
    "AWS_SECRET_ACCESS_KEY": "semkv-test-secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
"""What a client needs beside `AWS_ENDPOINT_URL`."""

Fault = Literal["none", "away", "hanging", "slow", "error 500", "half bodies"]


class S3Server(LocalServer):
    """A server of its own, started at once; a context manager.

    Raises:
        RuntimeError: it does not start.
    """

    def __init__(self) -> None:
        super().__init__(
            "S3",
            lambda port: [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        )

    def bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"semkv-{secrets.token_hex(8)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("PUT", f"/{name}")
            if (status := connection.getresponse().status) != 200:
                raise RuntimeError(f"no bucket was made: {status}")
        finally:
            connection.close()
        return name


class FaultProxy(LocalEndpoint):
    """Stands between clients and a server, and has the fault that it is told to; a context manager.

    Every request has a connection of its own.

    Args:
        port: the server's.

    Attributes:
        fault: what goes wrong from now on; with `away` connections are refused.
        requests: how many came.
    """

    SLOW_S: Final = 1.0
    """How long an answer takes that is slow."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.port = free_port()
        self.requests = 0
        self._fault: Fault = "none"
        self._ended = threading.Event()
        self._listener: socketserver.ThreadingTCPServer | None = None
        self._listen()

    @property
    def fault(self) -> Fault:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault) -> None:
        self._fault = fault
        self._ended.set()  # who hangs is let go
        self._ended = threading.Event()
        if fault == "away":
            self._stop()
        elif self._listener is None:
            self._listen()

    def close(self) -> None:
        """See `LocalEndpoint`."""
        self._ended.set()
        self._stop()

    def serve(self, client: socket.socket) -> None:
        """Answer one request. Called in a thread of the connection."""
        fault, ended = self._fault, self._ended
        request = _message(client)
        if not request:
            return
        self.requests += 1
        if fault == "hanging":
            ended.wait()
            return
        if fault == "error 500":
            client.sendall(
                b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            return
        if fault == "slow" and ended.wait(self.SLOW_S):
            return
        with socket.create_connection(("127.0.0.1", self._server_port)) as server:
            server.sendall(_closing(request))
            answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
        head, gap, body = answer.partition(b"\r\n\r\n")
        if fault == "half bodies":
            body = body[: len(body) // 2]
        client.sendall(head + gap + body)

    def _listen(self) -> None:
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    proxy.serve(self.request)
                except OSError:
                    return  # the client or the server went

        class Listener(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 128

        self._listener = Listener(("127.0.0.1", self.port), Handler)
        name = "semkv-fault-proxy"
        threading.Thread(target=self._listener.serve_forever, name=name, daemon=True).start()

    def _stop(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown()
            listener.socket.close()


@cache
def shared() -> S3Server:
    """This process's server, started when it is first asked for and stopped when the process ends."""
    server = S3Server()
    atexit.register(server.close)
    return server


def _message(connection: socket.socket) -> bytes:
    """A whole request: its head, and the body that its length says."""
    content = b""
    while b"\r\n\r\n" not in content:
        if not (more := connection.recv(1 << 16)):
            return b""
        content += more
    head, _, body = content.partition(b"\r\n\r\n")
    lines = [line.split(b":", 1) for line in head.split(b"\r\n")[1:]]
    fields = {name.strip().lower(): value.strip() for name, value in lines}
    if fields.get(b"expect", b"").lower() == b"100-continue":
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    parts, missing = [body], int(fields.get(b"content-length", b"0")) - len(body)
    while missing > 0:
        if not (more := connection.recv(1 << 16)):
            return b""
        parts.append(more)
        missing -= len(more)
    return head + b"\r\n\r\n" + b"".join(parts)


def _closing(request: bytes) -> bytes:
    """The request, such that the server ends the connection behind its answer."""
    head, gap, body = request.partition(b"\r\n\r\n")
    kept = [one for one in head.split(b"\r\n") if not one.lower().startswith(b"connection:")]
    return b"\r\n".join([*kept, b"Connection: close"]) + gap + body
