"""No PDF takes more time or memory than it may, or ends the process that reads it."""

import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from semkv_rag.corpus import pdf_text, read_document
from semkv_rag.errors import CorpusError
from tests.corpus.documents import pdf_with


def endless(folder: Path) -> Path:
    """A PDF of 100 kB whose one page takes its reader minutes."""
    content = b"BT /F1 12 Tf " + 3_000_000 * b"(a) Tj 1 0 Td " + b"ET"
    return pdf_with(folder / "endless.pdf", zlib.compress(content, 9), compressed=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_pdf_that_takes_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = endless(tmp_path)
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(pdf_text, "PDF_SECONDS", 2)
    used = os.times().children_user
    with pytest.raises(CorpusError, match="takes more than 2 s"):
        read_document(path)
    assert os.times().children_user - used < 4


@pytest.mark.slow
def test_a_pdf_that_takes_too_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf_text, "PDF_MEMORY_BYTES", 150 * 2**20)
    with pytest.raises(CorpusError, match="MemoryError"):
        read_document(endless(tmp_path))


def test_a_reader_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    monkeypatch.setattr(pdf_text, "_PROGRAM", dies)
    with pytest.raises(CorpusError, match="its reader ended with -11"):
        read_document(pdf_with(tmp_path / "a.pdf", b"BT (a) Tj ET"))


def test_what_the_reader_imports_is_not_this_packages(tmp_path: Path) -> None:
    """Beside the program stand modules whose names others have too; and torch takes seconds."""
    lists = tmp_path / "lists.py"
    lists.write_text(
        f"import runpy, sys\nsys.argv = ['', '60', '{2**32}', '1000']\n"
        f"runpy.run_path({str(pdf_text._PROGRAM)!r}, run_name='__main__')\n"
        "print('torch' in sys.modules, 'semkv_rag' in sys.modules)"
    )
    path = pdf_with(tmp_path / "a.pdf", b"BT /F1 12 Tf 20 200 Td (One) Tj ET")
    with path.open("rb") as file:
        ended = subprocess.run(
            [sys.executable, "-P", lists], stdin=file, capture_output=True, check=True, text=True
        )
    assert ended.stdout == '{"text": "One"}False False\n'
