"""`/ready`: 200 when prompts are answered with reuse, for whoever asks."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from semkv_rag.errors import StoreError
from semkv_rag.server import routes as routes_module
from semkv_rag.server.limits import Limits
from semkv_rag.server.routes import Routes
from semkv_rag.server.tenants import Tenancy
from workbench.server import Server


class Store:
    """Of which only the last change is asked for."""

    def __init__(self) -> None:
        self.asked = 0
        self.fault: Exception | None = None
        self.takes_s = 0.0

    def last_change(self, model: str, namespace: str) -> int:
        self.asked += 1
        time.sleep(self.takes_s)
        if self.fault is not None:
            raise self.fault
        return 1


def client(store: Store, obstacle: str | None = None) -> TestClient:
    capturer: Any = SimpleNamespace(store=store, fingerprint="m")
    return TestClient(Routes(Tenancy(), Limits(), capturer, {"obstacle": obstacle}))


def test_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    asking = client(store)
    for _ in range(5):
        answer = asking.get("/ready")
        assert (answer.status_code, answer.json()) == (200, {"gate": True, "store": True})
    assert store.asked == 1, "many probes are one question"
    monkeypatch.setattr(routes_module, "ASKED_S", 0.0)
    store.fault = StoreError("the password is hunter2")
    answer = asking.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"gate": True, "store": False})
    store.fault = None
    assert asking.get("/ready").status_code == 200


def test_a_store_that_hangs_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "ANSWERED_S", 0.1)
    store = Store()
    store.takes_s = 0.5
    assert client(store).get("/ready").json() == {"gate": True, "store": False}


def test_a_model_that_is_not_served_with_reuse_is_not_ready() -> None:
    answer = client(Store(), obstacle="sliding windows").get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"gate": False, "store": True})


def test_a_server_tells_it_without_a_key(server: Server) -> None:
    root = server.base_url.removesuffix("/v1")
    answer = httpx.get(f"{root}/ready", timeout=30)
    assert (answer.status_code, answer.json()) == (200, {"gate": True, "store": True})
    assert httpx.get(f"{root}/semkv/v1/info", timeout=30).status_code == 401
