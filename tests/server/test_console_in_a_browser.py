"""The console in a real browser: what a tenant sees, what it may do, and what names do in it: nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from semkv_rag.server.front import Front
from semkv_rag.server.tenants import CONSOLE, CONSOLE_PAGE
from tests.server.consoles import A, B, Served, serving
from workbench.browser import ATTACKS, Trap
from workbench.engines import Engines

SECRETS = ("console-c", "console-d", "the model", "Mir bol", "sprung")


@pytest.fixture(scope="module")
def served(engines: Engines, reader: Any) -> Iterator[Served]:
    with serving(engines.get(reader), "console-c", "console-d", ATTACKS) as served:
        yield served


@contextmanager
def listening(app: Front) -> Iterator[str]:
    """The app on a port of this machine; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def page(served: Served, browser: Browser) -> Iterator[Page]:
    """A browser of its own, with documents that may be changed."""
    context = browser.new_context()
    with listening(served.app(changes=True)) as address:
        page = context.new_page()
        page.goto(address + CONSOLE_PAGE)
        yield page
        context.close()


def enter(page: Page, key: str) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Show").click()


def names(page: Page) -> list[str]:
    """The documents that are shown."""
    return page.locator("#documents td.name").all_inner_texts()


def test_without_the_key_there_is_nothing_to_see(page: Page) -> None:
    expect(page.get_by_label("API key")).to_be_visible()
    expect(page.locator("#shown")).to_be_hidden()
    enter(page, "another key")
    expect(page.get_by_role("alert")).to_have_text("Unauthorized")
    expect(page.locator("#shown")).to_be_hidden()
    everything = page.content()
    assert not [secret for secret in SECRETS if secret in everything]


def test_a_tenant_sees_its_own_numbers_and_documents(served: Served, page: Page) -> None:
    trap = Trap(page)
    for key, own, other in ((A, served.a, served.b), (B, served.b, served.a)):
        enter(page, key)
        expect(page.locator("#namespace")).to_have_text(own)
        expect(page.locator("#model")).to_have_text("the model")
        expect(page.locator("#share")).to_have_text("100 %")
        expect(page.locator("#chunks")).to_have_text("stored, in 3 chunks")
        expect(page.locator("#with")).to_contain_text(" ms")
        expect(page.locator("#documents tr")).to_have_count(1)
        assert names(page) == [f"{ATTACKS} of {own}"]
        assert other not in page.content()
        page.get_by_role("button", name="Leave").click()
        expect(page.locator("#shown")).to_be_hidden()
        assert names(page) == [], "who leaves leaves nothing in the page"
    assert trap.asked
    assert {one.partition("?")[0].partition(CONSOLE)[2] for one in trap.asked} <= {
        *("state", "documents"),
        "",  # the page in the frame of the token map
    }


def test_numbers_follow_what_happens(served: Served, page: Page) -> None:
    enter(page, A)
    rows = page.locator("#requests tr")
    expect(rows).not_to_have_count(0)
    before = rows.count()
    # This thread has the browser's event loop.
    with ThreadPoolExecutor(1) as beside:
        beside.submit(served.ask, served.a, "which animal is the mascot ?").result()
        beside.submit(served.ask, served.b, "where does the team play ?").result()
    expect(rows).to_have_count(before + 1)
    expect(rows.first.locator("td").nth(1)).to_have_text("hit")


def test_the_map_of_a_request(served: Served, page: Page) -> None:
    trap = Trap(page)
    enter(page, A)
    page.locator("#requests tr").last.click()
    shown = page.frame_locator("#map")
    expect(shown.locator("pre")).to_contain_text("the mascot of")
    expect(shown.locator("td", has_text="sprung")).to_have_text(f"{ATTACKS} of {served.a}")
    assert served.b not in shown.locator("body").inner_text()
    colour = shown.locator("pre .exact").first.evaluate("one => getComputedStyle(one).background")
    assert "rgb(169, 223, 180)" in colour
    shown.locator("td", has_text="sprung").click()
    page.wait_for_timeout(200)
    assert (trap.sprung(), trap.dialogs) == ([], [])
    assert shown.locator("script, img, svg").count() == 0
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#one")).to_be_hidden()


def test_a_name_of_a_document_does_nothing(page: Page) -> None:
    trap = Trap(page)
    enter(page, A)
    page.locator("#documents td.name").click()
    page.get_by_label("part of a name").fill(ATTACKS)
    expect(page.locator("#documents tr")).to_have_count(1)
    page.wait_for_timeout(200)
    assert (trap.sprung(), trap.dialogs, trap.errors) == ([], [], [])
    assert page.locator("main :is(script, img, svg)").count() == 0
    # Whatever came to be markup would be stopped by the page's policy.
    page.evaluate("text => { document.querySelector('#more').innerHTML = text }", ATTACKS)
    page.wait_for_timeout(200)
    assert page.locator("#more img").count() == 1
    assert (trap.sprung(), trap.dialogs) == ([], [])


def test_nothing_can_be_changed_unless_the_operator_allows_it(
    served: Served, browser: Browser
) -> None:
    context = browser.new_context()
    with listening(served.app(changes=False)) as address:
        page = context.new_page()
        page.goto(address + CONSOLE_PAGE)
        enter(page, A)
        expect(page.locator("#documents tr")).to_have_count(1)
        assert page.locator("#documents button").count() == 0
        context.close()


def test_a_tenant_pins_and_deletes_its_own(served: Served, page: Page) -> None:
    """Last: a document goes."""
    trap = Trap(page)
    enter(page, B)
    page.get_by_role("button", name="pin", exact=True).click()
    expect(page.get_by_role("button", name="unpin")).to_be_visible()
    page.get_by_role("button", name="unpin").click()
    expect(page.get_by_role("button", name="pin", exact=True)).to_be_visible()
    page.get_by_role("button", name="delete").click()
    expect(page.locator("#more")).to_have_text("No document.")
    assert trap.dialogs == [f"Delete {ATTACKS} of {served.b} and its stored KV?"]
    assert names(page) == []
    page.get_by_role("button", name="Leave").click()
    enter(page, A)
    expect(page.locator("#documents tr")).to_have_count(1)
    assert trap.sprung() == []
