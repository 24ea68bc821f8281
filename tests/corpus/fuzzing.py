"""Broken documents, made from small sound ones, and what may become of them."""

from __future__ import annotations

import os
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from semkv_rag.corpus import read_document, split_text
from semkv_rag.errors import CorpusError
from semkv_rag.prompt_cache import Normalisation
from semkv_rag.prompt_cache.guard import veto
from semkv_rag.prompt_cache.guard.vetoes import LONGEST_PROMPT
from tests.corpus.documents import pdf_with
from tests.corpus.made_up_engine import word_tokenizer

KINDS = ("txt", "md", "html", "pdf")

BUDGET_SECONDS = {"txt": 5.0, "md": 5.0, "html": 5.0, "pdf": 10.0}
"""Processor time for one document: reading it, splitting it and comparing its text."""

LONGEST = 20_000
"""Bytes of a document that is made."""

# What means something somewhere, alone or many times over.
_PARTS = [
    b"\0", b"\xff", b"\xfe\xff", b"\xed\xa0\x80", "\u0301\u0334".encode(), "\u200b".encode(),
    "\ufdfa".encode(), "漢".encode(), "😀".encode(), b" ", b"\n", b"\r", b"\t", b"1,", b"9" * 400,
    b"(", b"[", b"[](", b"> ", b"# ", b"- ", b"1. ", b"`", b"```\n", b"|a|b|\n|-|-|\n", b"[a]: b\n",
    b"**", b"_a", b"\\", b"<", b"<div>", b"<p>", b"</p>", b"<!--", b"-->", b"<![CDATA[", b"]]>",
    b"<![if ", b"<?", b"<a b='", b'"', b"<script>", b"<pre>", b"<svg>", b"&#", b"&#xd800;", b"&amp",
    b"<meta charset=utf-16>", b"<meta charset=punycode>", b"not ", b"of ", b"a of ", b"<<", b">>",
    b"obj\n", b"endobj\n", b"stream\n", b"endstream\n", b"/Kids [2 0 R]", b"/Parent 3 0 R",
    b"4 0 R ", b"/Length 99999999 ", b"/Filter /FlateDecode ",
    b"/Filter [/LZWDecode /ASCII85Decode] ", b"/Count -1 ", b"xref\n", b"trailer\n",
    b"startxref\n0\n%%EOF", b"/Prev 0 ", b"/Size 99999999 ", b"BT ", b"(a) Tj ", b"/F1 Do ",
    b"1e400 ", b"-9999999999999999999 ", b"/W [0 99999999 1] ", b"/Type /ObjStm ",
    b"/Encrypt 5 0 R ",
]  # fmt: skip

_PROSE = (
    "The pump leaks since 5 March. Isn't it the 2nd one of the plant's pumps?\n\n"
    "Größe: 3,5 km; Kühlung läuft. 漢字の文章。 Not all of them, not 1,000 of 2.5!\n"
)
_MARKDOWN = (
    f"# Title\n\n{_PROSE}\n* one\n* two\n  1. `code`\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```\nx = 1\n```\n"
)
_PAGE = (
    "<!DOCTYPE html><html><head><meta charset='utf-8'><title>Pumps</title><style>p {}</style>"
    "<script>if (a < b) { c('</p>') }</script></head><body class=\"a b\" data-x='1'><!-- not this -->"
    f"<h1>The pump</h1><p>{_PROSE}</p><ul><li>one<li>two</ul><table><tr><td>a</td><td>b &amp; c</td>"
    "</tr></table><pre>x\n  y</pre><![CDATA[ d ]]><br/>&eacute;&#65;</body></html>"
)
_CONTENT = (
    b"BT /F1 12 Tf 20 200 Td (The pump leaks.) Tj 0 -20 Td [(It) -250 (was) 10 (old)] TJ ET"
    b" q 1 0 0 1 0 0 cm Q"
)
_ENCODING = b"/Encoding << /Type /Encoding /Differences [65 /B /C /eacute] >> "


def seeds(kind: str, folder: Path) -> list[bytes]:
    """Sound documents of a kind."""
    if kind == "pdf":
        path = folder / "seed.pdf"
        plain = pdf_with(path, _CONTENT).read_bytes()
        packed = pdf_with(path, zlib.compress(_CONTENT), compressed=True).read_bytes()
        return [plain, packed, pdf_with(path, _CONTENT, extra=_ENCODING).read_bytes()]
    text = {"txt": _PROSE, "md": _MARKDOWN, "html": _PAGE}[kind]
    return [
        text.encode(),
        text.encode("utf-16") if kind != "html" else text.encode("latin-1", "ignore"),
    ]


def broken(rng: random.Random, sound: list[bytes]) -> bytes:
    """One of `sound` with some faults."""
    data = rng.choice(sound)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
        part = rng.choice(_PARTS)
        match rng.randrange(8):
            case 0:
                flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 3])
                data = data[:at] + flipped + data[at + 3 :]
            case 1:
                data = data[:at] + data[end:]
            case 2:
                data = data[:at]
            case 3:
                data = data[:at] + part + data[at:]
            case 4:
                data = data[:at] + part * rng.randrange(1, 1 + LONGEST // len(part)) + data[at:]
            case 5:
                data = data[:at] + data[at:end] * rng.randrange(2, 30) + data[end:]
            case 6:
                data = data[:at] + rng.randbytes(rng.randrange(1, 50)) + data[at:]
            case 7:
                other = rng.choice(sound)
                data = data[:at] + other[rng.randrange(len(other)) :]
        data = data[:LONGEST]
    return data


@dataclass
class Outcome:
    """What became of many documents."""

    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    slowest: int = -1
    too_slow: list[int] = field(default_factory=list)


def fuzz(kind: str, numbers: range, folder: Path) -> Outcome:
    """Read, split and compare broken documents; each is made again by its kind and number.

    Raises:
        AssertionError: one ended in another error than CorpusError.
    """
    outcome = Outcome()
    sound = seeds(kind, folder)
    path = folder / f"document.{kind}"
    tokenizer = word_tokenizer()
    for number in numbers:
        path.write_bytes(broken(random.Random(f"{kind} {number}"), sound))
        started = _cpu_seconds()
        try:
            text = read_document(path)
            outcome.read += 1
            for chunk in split_text(text, tokenizer, 64, 8, kind == "md"):
                tokenizer.encode(chunk.text)
            Normalisation()(text)
            veto(_PROSE, text[:LONGEST_PROMPT])
        except CorpusError:
            outcome.refused += 1
        except Exception as error:
            raise AssertionError(f"document {number} of kind {kind}") from error
        took = _cpu_seconds() - started
        if took > outcome.slowest_s:
            outcome.slowest_s, outcome.slowest = took, number
        if took > BUDGET_SECONDS[kind]:
            outcome.too_slow.append(number)
    return outcome


def _cpu_seconds() -> float:
    """Processor time of this process and the ended ones it started."""
    return sum(os.times()[:4])
