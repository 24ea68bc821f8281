"""What a browser shows of an HTML page, as text.

One pass over the page's tags, without a tree: time is linear in the page, and tags may nest as deep
as they like.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser

from bs4.dammit import EncodingDetector, UnicodeDammit

from semkv_rag.errors import CorpusError

_BLOCK_TAGS = """address article aside blockquote dd div dl dt fieldset figcaption figure footer form
h1 h2 h3 h4 h5 h6 header hr main nav ol p pre section table title ul"""
_UNSEEN_TAGS = "noscript rp rt script style svg template"
_VOID_TAGS = """area base basefont bgsound br col command embed frame hr image img input isindex keygen
link menuitem meta nextid param source spacer track wbr"""

_BLOCKS = frozenset(_BLOCK_TAGS.split())
_UNSEEN = frozenset(_UNSEEN_TAGS.split())
_VOID = frozenset(_VOID_TAGS.split())

# What stands behind an element that is set apart.
_BEHIND = (
    dict.fromkeys(_BLOCKS, "\n\n")
    | dict.fromkeys(("br", "caption", "li", "tr"), "\n")
    | dict.fromkeys(("td", "th"), " ")
)

MAX_HTML_BYTES = 32 * 2**20
"""Bytes of a page. `html.parser` may take 250 times as much memory, for a tag of many attributes."""

_MOST_UNCLOSED = 20
"""Tags and comments without an end that a page may have. Each costs another look at what is left."""


def html_text(data: bytes) -> str:
    """The text of a page: blocks are set apart by blank lines, white space is that of the page's `pre`.

    Raises:
        CorpusError: it has NUL bytes, or too many of its tags and comments have no end.
    """
    characters = _decoded(data)
    if "\0" in characters:
        raise CorpusError("not text: it has NUL bytes")
    page = _Page()
    page.read(_mended(characters))
    # One space at a line's start is left of the source's own line breaks; more is a `pre`'s.
    lines = (re.sub(r"^ (?! )", "", line.rstrip()) for line in page.text().splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


class _Page(HTMLParser):
    """Takes what the page shows out of its tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._shown: list[str] = []
        self._string: list[str] = []  # the pieces of the text since the last tag
        self._open: list[str] = []
        self._count: Counter[str] = Counter()  # of the open elements
        self._unseen = 0  # open elements in which nothing is shown

    def read(self, page: str) -> None:
        """Take in the whole page.

        Raises:
            CorpusError: too many of its tags and comments have no end.
        """
        self.feed(page)
        for _ in range(_MOST_UNCLOSED):
            if not self._stopped:
                break
            # What has no end is no tag. (`close` would look for the end again at each that follows.)
            rest, self.rawdata = self.rawdata[1:], ""
            self.handle_data("<")
            self.feed(rest)
        if self._stopped:
            raise CorpusError(
                f"broken HTML: more than {_MOST_UNCLOSED} tags or comments have no end"
            )
        self.close()
        self._end_string()
        while self._open:
            self._pop()

    @property
    def _stopped(self) -> bool:
        """Whether the parser waits for the end of a tag or a comment."""
        return self.cdata_elem is None and self.rawdata.startswith("<")

    def text(self) -> str:
        return "".join(self._shown)

    def handle_data(self, data: str) -> None:
        self._string.append(data)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._end_string()
        if tag in _BLOCKS:
            self._show("\n\n")
        if tag in _VOID:
            self._show(_BEHIND.get(tag, ""))
            return
        self._open.append(tag)
        self._count[tag] += 1
        self._unseen += tag in _UNSEEN

    def handle_endtag(self, tag: str) -> None:
        self._end_string()
        if self._count[tag]:
            while self._pop() != tag:
                pass

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_comment(self, data: str) -> None:
        self._end_string()

    def handle_decl(self, decl: str) -> None:
        self._end_string()

    def handle_pi(self, data: str) -> None:
        self._end_string()

    def unknown_decl(self, data: str) -> None:
        self._end_string()
        if data.upper().startswith("CDATA["):
            self._show(data[len("CDATA[") :])

    def _pop(self) -> str:
        """Close the innermost open element."""
        tag = self._open.pop()
        self._count[tag] -= 1
        self._unseen -= tag in _UNSEEN
        self._show(_BEHIND.get(tag, ""))
        return tag

    def _end_string(self) -> None:
        string = "".join(self._string)
        self._string.clear()
        if string:
            self._show(string if self._count["pre"] else re.sub(r"\s+", " ", string))

    def _show(self, text: str) -> None:
        if not self._unseen:
            self._shown.append(text)


def _mended(page: str) -> str:
    """The page without what `html.parser` stumbles over."""
    # A number that `int` refuses to read for its length.
    page = re.sub(r"&#([0-9]{8,})", lambda number: f"&#{(number[1].lstrip('0') or '0')[:8]}", page)
    # A browser takes these for comments that end with the tag, as it does `<!x>`.
    page = re.sub(r"<!\[(?!CDATA\[)", "<!-[", page, flags=re.IGNORECASE)
    # No tag can end behind the last `>`.
    tags, bracket, text = page.rpartition(">")
    return tags + bracket + text.replace("<", "&lt;")


# ---- encodings ---------------------------------------------------------------------------------

_DECLARED_IN = 16_384
"""Bytes at a page's start in which its encoding may be declared; browsers look at 1,024."""

_GUESSED_FROM = 65_536
"""Bytes an encoding is guessed from."""

# Those of characters: Python has others, some of which take quadratic time. A declaration that could
# be read is not in UTF-16 or UTF-32.
_DECLARABLE = re.compile(
    r"ascii|utf-8(-sig)?|cp\d+|iso8859-\d+|koi8-.|mac-.*|tis-620|ptcp154"
    r"|gb2312|gbk|gb18030|hz|big5(hkscs)?|euc.*|iso2022.*|shift.*|johab"
)


def _decoded(data: bytes) -> str:
    """The page's characters: by byte order mark, declaration, as UTF-8 or, failing all, by guessing."""
    detector = EncodingDetector(data, is_html=True)
    data, marked = detector.markup, detector.sniffed_encoding  # the mark is taken off
    declared = detector.find_declared_encoding(data[:_DECLARED_IN], is_html=True)
    encodings = [marked] if marked else [name for name in (_charset(declared), "utf-8") if name]
    for encoding in _and_guessed(encodings, data):
        try:
            return data.decode(encoding)
        except UnicodeError:
            continue
    return data.decode(encodings[0], "replace")


def _and_guessed(encodings: list[str], data: bytes) -> Iterator[str]:
    yield from encodings
    # Cut where no character of several bytes can be.
    sample = data[:_GUESSED_FROM].rpartition(b"<")[0] or data[:_GUESSED_FROM]
    dammit = UnicodeDammit(sample, is_html=True, exclude_encodings=encodings)
    if guessed := _charset(dammit.original_encoding):
        yield guessed
    yield "windows-1252"


def _charset(name: str | None) -> str | None:
    """Python's name of an encoding that a page may declare."""
    if name is None:
        return None
    try:
        found = codecs.lookup(UnicodeDammit.CHARSET_ALIASES.get(name.lower(), name)).name
    except (LookupError, ValueError):  # ValueError: a NUL in the name
        return None
    return found if _DECLARABLE.fullmatch(found.replace("_", "-")) else None
