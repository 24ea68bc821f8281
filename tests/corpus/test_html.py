"""Any page gives its text or says why not, in time that is linear in its length."""

import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from bs4 import BeautifulSoup, NavigableString

from semkv_rag.corpus import read_document
from semkv_rag.corpus.html_text import MAX_HTML_BYTES, html_text
from semkv_rag.errors import CorpusError
from tests.budget import assert_linear

PIECES = [
    "<p>", "</p>", "<div class='a b'>", "</div>", "<b>", "</b>", "text ", "a  b\n c", "&amp;",
    "&nbsp;", "&lt;x&gt;", "<br>", "<br/>", "</br>", "<ul>", "<li>", "</li>", "</ul>", "<pre>",
    "</pre>", "  x\n\n\n  y ", "<!-- c -->", "<table>", "<tr>", "<td>", "</td>", "</tr>",
    "</table>", "<h1>", "</h1>", "<script>var a = '<p>';</script>", "<style>p{}</style>", "<svg>",
    "</svg>", "<title>t</title>", "<textarea>  k </textarea>", "é漢😀", "<img src=x alt='y>z'>",
    '<a href="u?a=1&b=2">', "</a>", "<noscript>n</noscript>", "<ruby>", "<rt>r</rt>", "</ruby>",
    "&#65;", "&#x41;", "&#128;", "&eacute;", "<![CDATA[ q  w ]]>", "<?php x ?>", "<!DOCTYPE html>",
    "<p/>", "<td/>", "a < b", "1 > 2", "<![if !IE]>", "<![endif]>", "<!--[if IE]>x<![endif]-->",
]  # fmt: skip


def by_tree(page: str) -> str:
    """What `html_text` says, found another way: on Beautiful Soup's tree."""
    soup = BeautifulSoup(page, "html.parser")
    for tag in soup(["script", "style", "template", "noscript", "svg"]):
        tag.decompose()
    for string in soup.find_all(string=True):
        if string.find_parent("pre") is None and type(string) is NavigableString:
            string.replace_with(NavigableString(re.sub(r"\s+", " ", string)))
    breaks = {
        "\n\n": "address|article|aside|blockquote|dd|div|dl|dt|fieldset|figcaption|figure|footer|form"
        "|h[1-6]|header|hr|main|nav|ol|p|pre|section|table|title|ul",
        "\n": "br|caption|li|tr",
        " ": "td|th",
    }
    for blank, tags in breaks.items():
        for tag in soup(re.compile(f"^({tags})$")):
            tag.insert_after(blank)
            if blank == "\n\n":
                tag.insert_before(blank)
    lines = (re.sub(r"^ (?! )", "", line.rstrip()) for line in soup.get_text().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


@pytest.mark.slow
def test_pages_give_what_their_tree_does() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        page = "".join(rng.choices(PIECES, k=rng.randrange(1, 30)))
        assert html_text(page.encode()) == by_tree(page), page


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern",
    [
        "<div>", "<div><p>", "<br>", "<li>x", "<!--", "<!-->", "<![CDATA[", "<![foo ", "<a ",
        "<a x='>' ", '<a b="', "<", "</", "<!", "&#", "<script>", "<pre> ", "] ]", "-- ",
    ],
)  # fmt: skip
def test_reading_is_linear(pattern: str) -> None:
    for before, behind in (("", ""), ("<a ", ">"), ("<p>", "-->]]>")):

        def read(times: int, before: str = before, behind: str = behind) -> Callable[[], object]:
            return partial(answer, f"{before}{times * pattern}{behind}".encode())

        assert_linear(read, 30_000)


def answer(page: bytes) -> str:
    """The page's text, or why there is none."""
    try:
        return html_text(page)
    except CorpusError as error:
        return str(error)


def test_tags_nest_as_deep_as_they_like() -> None:
    deep = 100_000
    assert html_text(f"{'<div>' * deep}one{'</div>' * deep}<p>two".encode()) == "one\n\ntwo"


def test_what_has_no_end_is_text() -> None:
    assert html_text(b"<p>one <!-- two <b>three</b>") == "one <!-- two three"
    assert html_text(b"<p>one <a href='two") == "one <a href='two"
    assert html_text(b"<p>if a <b and c <d then") == "if a <b and c <d then"
    with pytest.raises(CorpusError, match="have no end"):
        html_text(b"<!-- a <b>b</b> " * 1000)


def test_marked_sections_of_any_name_are_comments() -> None:
    assert html_text(b"<p>a<![foo bar]>b<![if !vml]>c<![endif]>d") == "abcd"


def test_references_of_any_length() -> None:
    assert html_text(b"&#" + b"1" * 10_000 + b";&#0000000065;&#xd800;&#x" + b"f" * 10_000) == (
        "\ufffdA\ufffd\ufffd"
    )


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("é漢".encode(), "é漢"),
        (
            "Größe und Höhe der Kühlung für Geräte".encode("latin-1"),
            "Größe und Höhe der Kühlung für Geräte",
        ),
        (b"\xff\xfe" + "é漢".encode("utf-16-le"), "é漢"),
        ("<meta charset=shift_jis>日本".encode("shift_jis"), "日本"),
        ("<meta charset=x-sjis>日本".encode("shift_jis"), "日本"),
        ("<?xml version='1.0' encoding='koi8-r'?><p>мир".encode("koi8-r"), "мир"),
        ("<meta charset=utf-16>é漢".encode(), "é漢"),
        (b"<meta charset=punycode>a-b99", "a-b99"),
        (b"<meta charset=unicode_escape>\\ud800", "\\ud800"),
        (b"<meta charset=none-of-that>a", "a"),
    ],
)
def test_encodings(page: bytes, text: str) -> None:
    assert html_text(page) == text


def test_a_declared_encoding_that_is_not_kept_to() -> None:
    assert html_text(b"<meta charset=utf-8><p>caf\xe9 cr\xe8me") == "café crème"


def test_what_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="NUL"):
        html_text(b"<p>a\0b")
    with (tmp_path / "a.html").open("wb") as file:
        file.truncate(MAX_HTML_BYTES + 1)
    with pytest.raises(CorpusError, match="larger than 32 MiB"):
        read_document(tmp_path / "a.html")
