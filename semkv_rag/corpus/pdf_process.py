"""The program that reads a PDF on its standard input and prints its text, or why not, as JSON.

Its arguments are bounds: seconds of processor time, bytes of address space, characters of text.
It imports nothing of this package, which would take longer than most PDFs.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import BinaryIO


def _bound(what: int, most: int, grace: int = 0) -> None:
    """Set a soft bound, and a hard one above it, within what holds already."""
    hard = resource.getrlimit(what)[1]
    limits = [most, most + grace]
    if hard != resource.RLIM_INFINITY:
        limits = [min(limit, hard) for limit in limits]
    resource.setrlimit(what, (limits[0], limits[1]))


def _text(file: BinaryIO, characters: int) -> str:
    from pypdf import PdfReader

    parts: list[str] = []
    with PdfReader(file) as reader:
        for page in reader.pages:
            parts.append(page.extract_text())
            characters -= len(parts[-1])
            if characters < 0:
                raise ValueError("it has too much text")
    text = "\n\n".join(parts).strip()
    # Fonts may map to halves of a UTF-16 pair: join them, and replace those that stand alone.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def main() -> None:
    """Print {"text": …} or {"error": …}."""
    seconds, memory, characters = map(int, sys.argv[1:])
    _bound(resource.RLIMIT_CORE, 0)
    _bound(resource.RLIMIT_CPU, seconds, grace=5)
    _bound(resource.RLIMIT_AS, memory)
    # pypdf has errors of its own, but a broken file also ends in KeyError, RecursionError and more.
    try:
        answer = {"text": _text(sys.stdin.buffer, characters)}
    except Exception as error:
        reason = str(error).encode(errors="replace").decode() or type(error).__name__
        answer = {"error": f"broken or locked PDF: {reason}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
