"""A server that is not `semkv serve` answers, but stores nothing; it is told what to start."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from semkv_rag.errors import EngineError
from semkv_rag.llm import RemoteBackend


class _KnowsNothing(BaseHTTPRequestHandler):
    """404 to everything, as any web server does under paths it has not."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def other() -> Iterator[RemoteBackend]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _KnowsNothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield RemoteBackend(f"http://127.0.0.1:{server.server_port}/v1", timeout=5)
        server.shutdown()
        thread.join()


def test_it_stores_nothing_and_the_error_says_what_does(other: RemoteBackend) -> None:
    for act in (
        other.fingerprint,
        other.store_id,
        lambda: other.store_texts([("name", ["text"])]),
        lambda: other.forget(["name"]),
    ):
        with pytest.raises(EngineError, match="semkv serve"):
            act()


def test_what_it_does_not_tell_is_left_to_the_request(other: RemoteBackend) -> None:
    assert other.supports_tools
    assert other.supports_images
