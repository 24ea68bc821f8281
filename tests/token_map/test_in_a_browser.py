"""Token maps in a real browser: what they show, and that text of prompts and documents stays text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from semkv_rag import ReuseReport
from semkv_rag.token_map import MappedSpan, TokenMap
from semkv_rag.token_map.html import KINDS
from workbench.browser import ATTACKS, Trap

pytestmark = pytest.mark.slow

LIGHT = {"cached": "#d9d9e3", "exact": "#a9dfb4", "recomputed": "#f9b87a", "computed": "#ffffff"}
DARK = {"cached": "#44444f", "exact": "#1f5c33", "recomputed": "#8a4a10", "computed": "#1b1b1f"}
EVIL = f"{ATTACKS}.md"

PIECES = (*"abcdefghijklmno", ATTACKS)
SPANS = (
    MappedSpan(1, 4, True, "a" * 64, source=EVIL, stored_at=0.0),
    MappedSpan(6, 12, False, "b" * 64, ((7, 9), (11, 12)), "091238", "two.txt", 40),
)
REPORT = ReuseReport(
    kv_cache="hit",
    prompt_tokens=16,
    exact_tokens=3,
    reused_tokens=6,
    reason=ATTACKS,
    selector=ATTACKS,
    token_map=TokenMap(PIECES, 2, SPANS),
)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def opened(page: Page, html: str, folder: Path) -> Trap:
    """The page that a user saved, as a file."""
    trap = Trap(page)
    saved = folder / "prompt.html"
    saved.write_text(html)
    page.goto(saved.as_uri())
    return trap


def painted(page: Page, selector: str) -> str:
    """The colour behind an element, as #rrggbb."""
    colour = page.locator(selector).first.evaluate("one => getComputedStyle(one).backgroundColor")
    numbers = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", colour)
    assert numbers, colour
    return "#" + "".join(f"{int(number):02x}" for number in numbers.groups())


def test_it_shows_the_prompt_and_what_became_of_it(page: Page, tmp_path: Path) -> None:
    trap = opened(page, REPORT.to_html(), tmp_path)
    assert page.title() == "semkv: a prompt"
    shown = page.locator("pre").evaluate(
        "pre => [...pre.querySelectorAll('span')].map(one => one.textContent).join('')"
    )
    assert shown == "".join(PIECES)
    assert page.locator("pre b.chunk").all_inner_texts() == ["1", "2"]
    documents = page.locator("tbody tr td:nth-child(2)").all_inner_texts()
    assert documents == [EVIL, "two.txt"]
    legend = page.locator(".semkv > ul").first.locator("li").all_inner_texts()
    assert legend[0] == "in vLLM's prefix cache: 2 (12%)"
    assert len(legend) == len(KINDS)
    assert len(trap.asked) == 1, "nothing but the page itself"


@pytest.mark.parametrize(("scheme", "colours"), [("light", LIGHT), ("dark", DARK)])
def test_each_kind_has_its_colour(
    page: Page, tmp_path: Path, scheme: str, colours: dict[str, str]
) -> None:
    page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
    opened(page, REPORT.to_html(), tmp_path)
    for kind, colour in colours.items():
        assert painted(page, f"pre span.{kind}") == colour, kind
        assert painted(page, f".bar span.{kind}") == colour, kind
        assert painted(page, f"li i.{kind}") == colour, kind


def test_the_bar_is_as_wide_as_the_counts_say(page: Page, tmp_path: Path) -> None:
    opened(page, REPORT.to_html(), tmp_path)
    counts = REPORT.token_map.counts() if REPORT.token_map else {}
    whole = page.locator(".bar").evaluate("bar => bar.clientWidth")
    for kind, count in counts.items():
        width = page.locator(f".bar span.{kind}").evaluate("one => one.offsetWidth")
        assert width == pytest.approx(whole * count / len(PIECES), abs=1.5)


def test_what_is_wanted_less_is_paler(page: Page, tmp_path: Path) -> None:
    opened(page, REPORT.to_html(), tmp_path)
    reused = page.locator("pre span.reused")
    titles = reused.evaluate_all("all => all.map(one => one.title)")
    assert [re.findall(r"wanted (\d) of 9", title) for title in titles] == [["0"], ["2"], ["3"]]
    colours = reused.evaluate_all("all => all.map(one => getComputedStyle(one).backgroundColor)")
    shades = [float(re.findall(r"/ ([\d.]+)\)", colour)[0]) for colour in colours]
    assert shades == pytest.approx([0.40, 0.52, 0.58], abs=0.01)


def test_a_token_says_what_became_of_it_where_the_mouse_is(page: Page, tmp_path: Path) -> None:
    opened(page, REPORT.to_html(), tmp_path)
    token = page.locator("pre span", has_text=re.compile("^h$"))
    token.hover()
    told = page.evaluate("() => document.querySelector('pre span:hover').title")
    assert told == "loaded, computed again; chunk 2; wanted 9 of 9"
    page.locator(".bar span.exact").hover()
    told = page.evaluate("() => document.querySelector('.bar span:hover').title")
    assert told == "loaded, exact: 2"


def test_text_of_prompts_and_documents_does_nothing(page: Page, tmp_path: Path) -> None:
    trap = opened(page, REPORT.to_html(), tmp_path)
    page.locator("pre span", has_text="sprung").click()
    page.locator("td", has_text="sprung").click()
    page.wait_for_timeout(200)
    assert (trap.sprung(), trap.dialogs, trap.errors) == ([], [], [])
    assert page.locator("script, img, svg").count() == 0
    assert len(trap.asked) == 1


def test_nor_in_a_notebook_whose_scripts_run(page: Page) -> None:
    """There, no policy of ours forbids scripts: what guards is that text is written as text."""
    trap = Trap(page)
    page.set_content(f"<body>{REPORT._repr_html_()}</body>")
    page.wait_for_timeout(200)
    assert (trap.sprung(), trap.dialogs, trap.errors) == ([], [], [])
    assert page.locator("script, img, svg").count() == 0
    assert "sprung" in page.inner_text("pre")


def test_the_trap_springs_where_text_is_markup(page: Page) -> None:
    trap = Trap(page)
    page.set_content(f'<body title="x">{ATTACKS}</body>')
    page.wait_for_timeout(200)
    assert trap.sprung()
    assert "sprung" in trap.dialogs


def test_the_policy_of_the_page_forbids_scripts(page: Page, tmp_path: Path) -> None:
    trap = opened(page, REPORT.to_html().replace("</body>", f"{ATTACKS}</body>"), tmp_path)
    page.wait_for_timeout(200)
    assert page.locator("script").count() == 1
    assert (trap.sprung(), trap.dialogs) == ([], [])
