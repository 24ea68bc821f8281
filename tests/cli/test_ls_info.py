"""`semkv ls` and `semkv info` tell what a store holds."""

from importlib.metadata import version
from pathlib import Path

from tests.cli.conftest import Semkv
from tests.corpus.made_up_engine import FINGERPRINT


def test_ls_lists_sources(semkv: Semkv, root: Path) -> None:
    listed = semkv("ls", "--store", root)
    assert listed.code == 0
    header, *lines = listed.out.splitlines()
    assert header.split() == ["source", "namespace", "model", "chunks", "updated", "pinned"]
    assert [line.split()[:4] for line in lines] == [
        ["a.txt", "other", FINGERPRINT[:16], "2"],
        ["docs/a.txt", "default", FINGERPRINT[:16], "2"],
        ["docs/b.txt", "default", FINGERPRINT[:16], "2"],
    ]


def test_ls_of_one_namespace_as_json(semkv: Semkv, root: Path) -> None:
    (source,) = semkv("ls", "--store", root, "--namespace", "other", "--json").data
    assert source["name"] == "a.txt"
    assert len(source["chunk_ids"]) == 2


def test_ls_lists_chunks(semkv: Semkv, root: Path) -> None:
    chunks = semkv("ls", "--chunks", "--store", root, "--namespace", "default", "--json").data
    assert {chunk["source"] for chunk in chunks} == {"docs/a.txt", "docs/b.txt"}
    assert len(chunks) == 4
    assert len({chunk["id"] for chunk in chunks}) == 3, "one chunk is of both"
    assert {chunk["token_count"] for chunk in chunks} == {8}
    lines = semkv("ls", "--chunks", "--store", root).out.splitlines()
    assert len(lines) == 1 + 6


def test_the_store_may_come_from_the_environment(semkv: Semkv, root: Path, monkeypatch) -> None:
    monkeypatch.setenv("SEMKV_STORE", str(root))
    assert len(semkv("ls", "--json").data) == 3


def test_info_counts_by_model_and_namespace(semkv: Semkv, root: Path) -> None:
    info = semkv("info", "--store", root, "--json").data
    assert info["models"] == {FINGERPRINT: {"model": "made-up", "dtype": "float32"}}
    counts = {one["namespace"]: (one["sources"], one["chunks"]) for one in info["namespaces"]}
    assert counts == {"default": (2, 3), "other": (1, 2)}
    assert info["free_bytes"] > 0
    text = semkv("info", "--store", root, "--namespace", "other").out
    assert "namespace other: 1 source, 2 chunks, 16 tokens" in text
    assert "namespace default" not in text


def test_a_folder_that_is_no_store_is_one_clear_line(semkv: Semkv, tmp_path: Path) -> None:
    for verb in ("ls", "info", "verify"):
        outcome = semkv(verb, "--store", tmp_path / "nowhere")
        assert outcome.code == 1
        assert outcome.out == ""
        assert outcome.err.startswith("semkv: there is no store at")
        assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "nowhere").exists()


def test_reading_changes_nothing_in_a_folder_without_an_index(semkv: Semkv, tmp_path: Path) -> None:
    outcome = semkv("ls", "--store", tmp_path)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err


def test_what_is_not_understood_is_exit_code_2(semkv: Semkv) -> None:
    assert semkv("ls").code == 2
    assert semkv("nothing").code == 2
    assert semkv("ls", "--nothing").code == 2


def test_the_version(semkv: Semkv) -> None:
    outcome = semkv("--version")
    assert outcome.code == 0
    assert outcome.out.strip() == f"semkv-rag {version('semkv-rag')}"
