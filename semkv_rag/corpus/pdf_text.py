"""The text of a PDF, read in a process of its own that has bounds.

A broken or hostile PDF can make its reader run for ever or take all memory, and no bound within
the reader stops that for certain. So a process that the system stops does the reading
(`pdf_process.py`); it costs a fifth of a second for each PDF.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from semkv_rag.corpus.opening import MAX_DOCUMENT_BYTES
from semkv_rag.errors import CorpusError

PDF_SECONDS = 300
"""Processor time that reading a PDF may take."""

PDF_MEMORY_BYTES = 4 * 2**30
"""Address space that reading a PDF may take."""

_PROGRAM = Path(__file__).with_name("pdf_process.py")


def pdf_text(file: BinaryIO) -> str:
    """The text of a PDF's pages, with blank lines between them.

    Args:
        file: on disk, at its start.

    Raises:
        CorpusError: it is broken or locked, has no text, or takes too long or too much memory.
    """
    bounds = (PDF_SECONDS, PDF_MEMORY_BYTES, MAX_DOCUMENT_BYTES)
    # -P: the modules beside the program are not to be found in place of others of the same name.
    command = [sys.executable, "-P", str(_PROGRAM), *map(str, bounds)]
    ended = subprocess.run(  # noqa: S603 - our own program and numbers
        command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    if ended.returncode == -signal.SIGXCPU:
        raise CorpusError(f"reading the PDF takes more than {PDF_SECONDS} s")
    if ended.returncode != 0:
        raise CorpusError(f"broken PDF: its reader ended with {ended.returncode}")
    answer = json.loads(ended.stdout)
    if "error" in answer:
        raise CorpusError(answer["error"])
    text: str = answer["text"]
    if not text:
        raise CorpusError("no text in the PDF: are its pages scanned images?")
    return text
