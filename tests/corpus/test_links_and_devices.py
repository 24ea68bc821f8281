"""Only regular files are read, and of a folder only what lies in it."""

import logging
import os
import socket
import subprocess
from pathlib import Path

import pytest

from semkv_rag.corpus import find_files, opening, precompute, read_document
from semkv_rag.errors import CorpusError
from semkv_rag.store import KVStore
from tests.corpus.made_up_engine import FINGERPRINT, MadeUpEngine


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "elsewhere/secret.txt"
    path.write_text("w1")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "docs"
    root.mkdir()
    (root / "a.txt").write_text("w2")
    return root


def names(folder: Path) -> list[str]:
    return [file.name for file in find_files([folder]).documents]


def test_a_link_out_of_the_folder_is_left_out(
    folder: Path, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "absolute.txt").symlink_to(secret)
    (folder / "relative.txt").symlink_to("../elsewhere/secret.txt")
    (folder / "chain.txt").symlink_to("relative.txt")
    with caplog.at_level(logging.WARNING, "semkv_rag"):
        found = find_files([folder])
    assert [file.name for file in found.documents] == ["docs/a.txt"]
    assert found.skipped == ("docs/absolute.txt", "docs/chain.txt", "docs/relative.txt")
    assert caplog.text.count("leads out of the given folder") == 3


def test_a_link_within_the_folder_is_a_document_of_its_own(folder: Path) -> None:
    """As volumes of Kubernetes have them: a.txt -> ..data/a.txt, ..data -> ..2026/."""
    (folder / "..2026").mkdir()
    (folder / "..2026/b.txt").write_text("w3")
    (folder / "..data").symlink_to("..2026")
    (folder / "b.txt").symlink_to("..data/b.txt")
    found = find_files([folder])
    assert [file.name for file in found.documents] == ["docs/a.txt", "docs/b.txt"]
    assert [read_document(file.path, file.folder) for file in found.documents] == ["w2", "w3"]


def test_a_link_that_is_given_itself_is_followed(folder: Path, secret: Path) -> None:
    (folder / "link.txt").symlink_to(secret)
    (file,) = find_files([folder / "link.txt"]).documents
    assert read_document(file.path, file.folder) == "w1"
    (folder.parent / "linked").symlink_to(folder)
    assert names(folder.parent / "linked") == ["docs/a.txt"]


def test_links_to_nothing_and_in_circles_are_left_out(folder: Path) -> None:
    (folder / "gone.txt").symlink_to("nothing.txt")
    (folder / "circle.txt").symlink_to("circle.txt")
    assert names(folder) == ["docs/a.txt"]


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_left_out(folder: Path) -> None:
    os.mkfifo(folder / "fifo.txt")
    (folder / "folder.txt").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket.md"))
        found = find_files([folder])
    assert [file.name for file in found.documents] == ["docs/a.txt"]
    assert found.skipped == ("docs/fifo.txt", "docs/socket.md")


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused_when_given_itself(folder: Path) -> None:
    os.mkfifo(folder / "fifo.txt")
    (folder / "null.txt").symlink_to("/dev/null")
    with pytest.raises(CorpusError, match="a FIFO"):
        find_files([folder / "fifo.txt"])
    with pytest.raises(CorpusError, match="not a regular file but a FIFO"):
        read_document(folder / "fifo.txt")
    with pytest.raises(CorpusError, match="not a regular file but a device"):
        read_document(folder / "null.txt")


@pytest.mark.timeout(60)
def test_what_was_put_in_a_files_place_is_not_read(
    folder: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding and reading; and between the first look at the file and opening it."""
    (file,) = find_files([folder]).documents
    file.path.unlink()
    file.path.symlink_to(secret)
    with pytest.raises(CorpusError, match="leads out"):
        read_document(file.path, file.folder)
    file.path.unlink()
    file.path.write_text("w2")
    look = opening._check_kind

    def look_and_swap(status: os.stat_result) -> None:
        look(status)
        if file.path.is_file():
            file.path.unlink()
            os.mkfifo(file.path)

    monkeypatch.setattr(opening, "_check_kind", look_and_swap)
    with pytest.raises(CorpusError, match="a FIFO"):
        read_document(file.path, file.folder)


def test_a_folder_on_the_way_that_became_a_link_is_not_followed(folder: Path, secret: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub/secret.txt").write_text("w4")
    file = find_files([folder]).documents[1]
    (folder / "sub").rename(folder / "was")
    (folder / "sub").symlink_to(secret.parent)
    with pytest.raises(CorpusError, match="leads out"):
        read_document(file.path, file.folder)


def test_a_run_goes_on_over_what_cannot_be_read(
    engine: MadeUpEngine, store: KVStore, folder: Path, secret: Path
) -> None:
    (folder / "b.txt").symlink_to(secret)
    os.mkfifo(folder / "c.txt")
    result = precompute(engine, [folder], chunk_tokens=8)
    assert (result.changed, result.failures) == (1, [])
    assert result.skipped == ("docs/b.txt", "docs/c.txt")
    assert [source.name for source in store.sources(FINGERPRINT, "default")] == ["docs/a.txt"]


def test_a_file_that_is_too_large_is_refused(folder: Path) -> None:
    with (folder / "a.txt").open("wb") as file:
        file.truncate(opening.MAX_DOCUMENT_BYTES + 1)
    with pytest.raises(CorpusError, match="larger than 256 MiB"):
        read_document(folder / "a.txt")


def test_names_that_are_no_unicode(engine: MadeUpEngine, folder: Path) -> None:
    raw = os.fsencode(folder) + b"/\xff.txt"
    Path(os.fsdecode(raw)).write_text("w5")
    result = precompute(engine, [folder], chunk_tokens=8)
    assert (result.changed, result.skipped) == (1, ("docs/\\udcff.txt",))
    with pytest.raises(CorpusError, match="another encoding than UTF-8"):
        find_files([Path(os.fsdecode(raw))])


def test_folders_that_nest_too_deep_are_refused(tmp_path: Path) -> None:
    deep = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(1500):
            os.mkdir("d", dir_fd=deep)
            inner = os.open("d", os.O_RDONLY, dir_fd=deep)
            os.close(deep)
            deep = inner
        with pytest.raises(CorpusError, match="cannot be listed"):
            find_files([tmp_path])
    finally:
        os.close(deep)
        subprocess.run(["/bin/rm", "-rf", str(tmp_path / "d")], check=True)
