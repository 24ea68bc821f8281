"""The console: a page that holds nothing, and what it fetches with a key: of that namespace alone."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from semkv_rag.config import ReuseOptions
from semkv_rag.engine.caller import CALLER, Caller
from semkv_rag.engine.recent import KEPT, NAMESPACES, RecentRequests
from semkv_rag.report import ReuseReport
from semkv_rag.server import console as console_module
from semkv_rag.server.console import Console
from semkv_rag.server.limits import Limits
from semkv_rag.server.routes import Routes
from semkv_rag.server.tenants import CONSOLE, CONSOLE_PAGE, Tenancy
from tests.server.consoles import EVIL, A, B, Served, serving
from workbench.engines import Engines


@pytest.fixture(scope="module")
def served(engines: Engines, reader: Any) -> Iterator[Served]:
    with serving(engines.get(reader), "console-a", "console-b") as served:
        yield served


def client_of(served: Served, *, changes: bool = True) -> TestClient:
    return TestClient(served.app(changes=changes))


def get(client: TestClient, path: str, key: str | None = A, **query: Any) -> Any:
    headers = {} if key is None else {"X-API-Key": key}
    return client.get(CONSOLE + path, headers=headers, params=query)


def test_the_page_holds_nothing_and_lets_no_script_in(served: Served) -> None:
    answer = client_of(served).get(CONSOLE_PAGE)
    assert answer.status_code == 200
    rules = answer.headers["content-security-policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]+)'", rules)
    assert f'<script nonce="{nonce}">' in answer.text
    assert "default-src 'none'" in rules
    assert "unsafe-inline" not in rules.partition("style-src")[0]
    assert nonce not in client_of(served).get(CONSOLE_PAGE).text, "another one each time"
    for secret in (served.a, served.b, "the model", "Mir bol"):
        assert secret not in answer.text
    # What is fetched becomes text of the page, never markup.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", answer.text)


@pytest.mark.parametrize("path", ["state", "documents", "request?number=1"])
def test_nobody_gets_in_without_the_key(served: Served, path: str) -> None:
    client = client_of(served)
    for key in (None, "another key"):
        assert get(client, path, key).status_code == 401
    changed = client.post(CONSOLE + "change", json={"name": "x", "do": "delete"})
    assert changed.status_code == 401


def test_a_tenant_sees_its_own_alone(served: Served) -> None:
    client = client_of(served)
    for key, own, other in ((A, served.a, served.b), (B, served.b, served.a)):
        state = get(client, "state", key).json()
        assert state["namespace"] == own
        assert len(state["requests"]) == 1
        assert (state["chunks"], state["outcomes"]) == (3, {"hit": 1})
        assert state["ttft_ms"].keys() == {"hit"}
        told = get(client, "documents", key).json()
        assert [one["name"] for one in told["documents"]] == [f"{EVIL} of {own}"]
        number = state["requests"][0]["number"]
        page = get(client, "request", key, number=number).json()["html"]
        assert own in page.replace("</span>", "").replace(" ", "") or "mascot" in page
        assert other not in page
        strange = get(client, "request", B if key == A else A, number=number)
        assert strange.status_code == 404
        for answer in (state, told):
            assert other not in str(answer)


def test_names_and_prompts_are_no_markup_in_a_map(served: Served) -> None:
    client = client_of(served)
    number = get(client, "state").json()["requests"][0]["number"]
    page = get(client, "request", number=number).json()["html"]
    assert EVIL not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_documents_are_found_by_a_part_of_their_name(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(served)
    assert get(client, "documents", name="CONSOLE-A").json()["total"] == 1
    assert get(client, "documents", name="nothing").json() == {"documents": [], "total": 0}
    (one,) = get(client, "documents").json()["documents"]
    assert one["stored"] == one["chunks"] > 0
    assert one["bytes"] > 1000
    assert one["used_at"] > 1e9
    monkeypatch.setattr(console_module, "SHOWN_DOCUMENTS", 0)
    assert get(client, "documents").json() == {"documents": [], "total": 1}


def test_nothing_changes_unless_the_operator_allows_it(served: Served) -> None:
    name = f"{EVIL} of {served.b}"
    body = {"name": name, "do": "pin"}
    refused = client_of(served, changes=False).post(
        CONSOLE + "change", json=body, headers={"X-API-Key": B}
    )
    assert refused.status_code == 403
    client = client_of(served)

    def change(**body: Any) -> Any:
        return client.post(CONSOLE + "change", json=body, headers={"X-API-Key": B})

    def pinned() -> bool:
        (one,) = get(client, "documents", B).json()["documents"]
        return bool(one["pinned"])

    assert change(name=name, do="explode").status_code == 400
    assert not pinned()
    assert change(name=name, do="pin").json() == {"done": "pin"}
    assert pinned()
    assert change(name=name, do="unpin").status_code == 200
    assert not pinned()
    # Another's document is none of this tenant's.
    assert change(name=f"{EVIL} of {served.a}", do="delete").status_code == 200
    assert get(client, "documents", A).json()["total"] == 1
    assert change(name=name, do="delete").status_code == 200
    assert get(client, "documents", B).json()["total"] == 0


def test_only_the_last_requests_are_kept() -> None:
    recent = RecentRequests()
    for number in range(KEPT + 5):
        recent.note("a", ReuseReport(prompt_tokens=number), [1, 2], 1.0, 2.0)
    kept = recent.of("a")
    assert [one.report.prompt_tokens for one in kept] == list(range(KEPT + 4, 4, -1))
    assert recent.get("a", 1) is None
    assert recent.get("a", KEPT + 5) is kept[0]
    for number in range(NAMESPACES):
        recent.note(f"n{number}", ReuseReport(), [1], 1.0, 2.0)
    assert recent.of("a") == []
    assert len(recent._by_namespace) == NAMESPACES


def test_long_prompts_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semkv_rag.engine.recent.MOST_TOKENS", 100)
    recent = RecentRequests()
    for name in ("a", "b", "c"):
        recent.note(name, ReuseReport(), [7] * 40, 1.0, 2.0)
    assert [len(recent.of(name)) for name in ("a", "b", "c")] == [0, 1, 1]
    recent.note("d", ReuseReport(), [7] * 400, 1.0, 2.0)
    assert recent._tokens == 0


async def test_a_store_that_hangs_holds_up_nobody_but_the_console() -> None:
    """vLLM and the tiers have work done in the loop's own threads: the console takes none of them."""
    hangs = threading.Event()

    class Store:
        def stats(self, namespace: str) -> list[Any]:
            hangs.wait(30)
            return []

    capturer: Any = SimpleNamespace(store=Store(), fingerprint="m")
    console = Console(capturer, RecentRequests(), "the model", None, changes=False)
    routes = Routes(Tenancy(), Limits(), capturer, {"obstacle": None}, console=console)
    token = CALLER.set(Caller("a", ReuseOptions()))
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(routes), base_url="http://server"
        ) as client:
            asked = [asyncio.create_task(client.get(CONSOLE + "state")) for _ in range(50)]
            await asyncio.sleep(0.1)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "at once"), 10) == "at once"
            assert not any(one.done() for one in asked)
            hangs.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    finally:
        hangs.set()
        CALLER.reset(token)
        routes.close()
