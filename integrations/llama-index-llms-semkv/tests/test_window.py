"""Who may hand in documents at the window of the process that has the engine."""

from __future__ import annotations

import json
from multiprocessing import AuthenticationError, current_process
from multiprocessing.connection import Client
from typing import Any

import pytest
from llama_index.llms.semkv.routing import Window


class Store:
    def __init__(self) -> None:
        self.stored: list[Any] = []

    def store(self, documents: Any) -> None:
        self.stored.append(documents)


def test_who_has_another_key_is_refused_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store()
    window = Window(store.store)
    with pytest.raises(AuthenticationError):
        Client(window.address, authkey=b"another")
    with Client(window.address, authkey=bytes(current_process().authkey)) as connection:
        connection.send_bytes(json.dumps(["a document"]).encode())
        assert connection.recv_bytes() == b""
    assert store.stored == [["a document"]]
    assert "a worker process was not let in" in caplog.text
